"""A recording's rows, in bounded memory.

recorded         the tables of a recording, times on the notebook's clock: what everything else reads
store            takes in batches of all ranks
ring_buffer      rows with a growing index
metric_thinning  earlier values of metrics, thinned where the table is full
text_table       texts by number
meanings         codes, texts and rows as the objects that they stand for
collectives      calls as a sequence
remote           calls to other ranks, remote references, distributed autograd
matching         the same collective on all its ranks, and the two ends of a message
parts            the rows of one cell, and other parts of a recording
frames           tables for pandas
saved            the tables as one file
"""
