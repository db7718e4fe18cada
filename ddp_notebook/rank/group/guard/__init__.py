"""Do all ranks call the same? Compared before the user's own collectives, sends and receives.

feature   what the guard adds to a rank
guard     what is compared, and the words where it differs
board     where the ranks of a group leave what is to be compared
messages  is what a rank takes what the other one sends?
memory    such a board in memory that they share, on one machine
"""
