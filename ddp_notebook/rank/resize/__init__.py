"""What a rank does when its session gets more or fewer ranks; its groups are `group.connections.renewal`'s.

feature          what resizing adds to a rank
resize_requests  the answers to the notebook's questions about it
blockers         what is in the way of that: what is sharded over the ranks, and RPC
sharded          models in shards are brought together before, and built and sharded again after
"""
