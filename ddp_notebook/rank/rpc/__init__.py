"""`torch.distributed.rpc` on a rank, in cells that may be run again.

open_calls         those that have not returned: what a rank waits for
send_hooks         what becomes of a call from torch's functions on that send it
agent              the one RPC agent of the process, which lives as long as that does
worker_rendezvous  how workers find each other, at the session's store
functions          functions of cells, which a callee may not have yet, or in another version
values             waits for values behind references, and errors for lost ones
interruptible      waits in C++, where no stop reaches them
failed_calls       why a call fails whose callee has ended, in words
running            what a callee runs, and what it says of errors
serving            the calls that it runs: they end with the cell of their caller
workers            the workers of one `init_rpc`, by the names and ranks that the cell gave them
context_ids        ids of distributed autograd, with ranks in them as in plain torch
feature            what RPC adds to a rank
rpc_functions      what cells call: `init_rpc`, `shutdown` and the lookups of workers, in place of torch's

record/            calls, remote references and distributed autograd as rows
"""
