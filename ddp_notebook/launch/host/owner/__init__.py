"""How the owner of a host server speaks with it.

requests  what is asked of it, and the replies
pulse     whether a process answers pings
"""
