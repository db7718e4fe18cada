"""Processes of a session: their start, their replacement, and the move of ranks from lost hosts.

members         the table of ranks: start, replace and resize
startup         from the options of a start to ranks that can run a cell
spawner         starts processes, admits them to the wire, and fences them
lost_hosts      unreachable and lost hosts, and the effect on their ranks
rank_placement  chooses hosts and devices for moved and new ranks
"""
