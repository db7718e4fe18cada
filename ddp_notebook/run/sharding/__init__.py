"""Models that are sharded over ranks: their parts, and their memory.

feature     declares `%ddp_memory`
placements  which rank holds which part of which tensor
growing_memory  message while the memory of one rank grows
out_of_memory  out-of-memory errors of the ranks
memory      memory by category, on each rank
"""
