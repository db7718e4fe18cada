"""Host server's side of the preflight check, which compares hosts before a group forms, see `launch.preflight`.

site          facts about its host that are not in the general facts
connectivity  tests of connections to other hosts
"""
