"""Resize of a session on a rank. Its groups are handled by `rank.group.connections.reconnect`.

feature          hooks of the resize feature
resize_requests  replies to the notebook's requests
blockers         obstacles to a resize: objects sharded over the ranks, and RPC
sharded          gathers sharded models before a resize, and builds and shards them again after it
"""
