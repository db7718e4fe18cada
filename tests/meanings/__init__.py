"""Programs in which ranks meet in collectives of equal size: wrong ones that mean different things, and right ones.

programs       the programs
test_meanings  runs them on ranks
test_threads   two threads that use one group
"""
