"""What of RPC is recorded.

rpc_recorder  remote calls as rows, on both sides
references    remote references as rows
contexts      distributed autograd as rows
call_stack    where a thread is in remote calls, for these
"""
