"""The owner's side of the stream to a host server.

requests  requests, and the replies
pulse     whether a process answers pings
"""
