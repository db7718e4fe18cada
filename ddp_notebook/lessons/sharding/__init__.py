"""Models in shards.

placement   the picture of who holds what
"""
