"""Cells on the ranks: what they are sent with, what comes back, and how that is shown; values there and back.

options, ranks  what a cell's line asks for; sets of ranks
cells           sends cells one after the other
watch           the thread that waits for one
interrupt       the kernel's interrupt, as a flag
outcome         how a cell ended: the error that the notebook raises

text            the bytes of a rank's pipes, cut and put in order with its displays
cell            one cell under way on a set of ranks
result          what a cell left behind, by rank
screen          output in the notebook ──► fold (equal lines of several ranks)
                                       ──► live (unfinished lines) ──► outlet (the way to the front end)
log             all that a rank wrote, on disk

questions       questions to ranks, and their answers
exchange        values there and back; `values` is what the user holds
comms           widgets of ranks
"""
