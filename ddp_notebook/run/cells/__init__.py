"""One cell after the other: sent to its ranks, waited for, and ended.

cells            sends cells one after the other
cell_messages    what ranks say of them: to which cell it goes
options          what a cell's magic line asks for
run_queue        who has the ranks: one cell, transfer or healing at a time
cell             one cell under way: collects what comes back
watch            the thread that waits for one; hosts that are not heard and stopped processes meanwhile
interrupt        the kernel's interrupt, as a flag
abandoned_cells  ends cells that nobody waits for any more
result           the results of a cell by rank, and the errors that the notebook raises for them
"""
