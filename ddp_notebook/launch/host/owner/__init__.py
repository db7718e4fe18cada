"""The owner's side of the stream to a host server.

requests  requests, the replies, and the time without an answer to a ping
"""
