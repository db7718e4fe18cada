"""Models that are spread over ranks: who holds what, and the memory that it takes.

feature     declares `%ddp_memory`
placements  which rank holds which part of which tensor
memory      bytes by what they are for, on each rank
"""
