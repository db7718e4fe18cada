"""Models that are sharded over ranks: their parts, and their memory.

feature     declares `%ddp_memory`
placements  which rank holds which part of which tensor
memory      memory by category, on each rank
"""
