"""One cell on the ranks: what it was sent with, what comes back, and how that is shown.

text       the bytes of a rank's pipes, cut into the text of each cell
cell       one cell under way on a set of ranks
result     what a cell left behind, by rank
screen     output in the notebook, labelled by rank
interrupt  the kernel's interrupt, as a flag
"""
