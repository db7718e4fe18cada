"""Send cells to their ranks one after the other, wait for them, and end them.

cells            sends cells one after the other
cell_messages    routes messages of ranks to their cell
cell_options     options on a cell's magic line
run_queue        access to the ranks: one cell, transfer or healing at a time
cell             a running cell: collects its output and results
watch            waits for one cell; watches for unreachable hosts, stopped processes, and ranks that wait for ranks
                 which have ended the cell
interrupt        the kernel's interrupt, as a flag
abandoned_cells  ends cells that no thread waits for any more
result           results of a cell by rank, and the errors that the notebook raises for them
"""
