"""Models in shards: who holds what, what it takes, and what is wrong with it."""
