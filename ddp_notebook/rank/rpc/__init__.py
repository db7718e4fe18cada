"""`torch.distributed.rpc` on a rank, in cells that may be run again.

open_calls         calls of this rank without an answer
send_hooks         hooks around the torch functions that send a call
rpc_agent          the RPC agent of the process, which lives as long as the process
worker_rendezvous  rendezvous of the workers at the session's store
functions          functions of cells, which a callee may not have yet, or in another version
rref_values        waits for the values of remote references, and errors for lost values
interruptible      waits in C++ that an interrupt cannot reach
failed_calls       error messages for calls whose callee has ended
running            execution of calls on the callee, and its error messages
serving            calls that this rank executes; they end with the cell of their caller
workers            workers of one `init_rpc`, with the names and ranks that the cell assigned
context_ids        ids of distributed autograd, with ranks in them as in plain torch
feature            hooks of the RPC feature
rpc_functions      replacements of `init_rpc`, `shutdown` and the lookup of workers

record/  calls, remote references and distributed autograd as recorded rows
"""
