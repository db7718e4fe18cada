"""Rows of a recording, in bounded memory.

recorded         tables of a recording, with times on the notebook's clock; the interface for other modules
store            receives batches of all ranks
ring_buffer      rows with a growing index
metric_thinning  earlier values of metrics, thinned when the table is full
text_table       texts by number
meanings         codes, texts and rows as objects
collectives      calls as a sequence
rpc_rows         RPC calls, remote references, distributed autograd
distinct         distinct combinations of values in columns
matching         matches a collective on all its ranks, and the two ends of a message
parts            rows of one cell, and other parts of a recording
frames           tables for pandas
saved            tables as one file
"""
