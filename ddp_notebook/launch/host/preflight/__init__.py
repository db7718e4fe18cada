"""What a host server tells those who compare hosts before a group forms, see `launch.preflight`.

site          what its host is like, beside the facts
connectivity  whether other hosts are reached from it
"""
