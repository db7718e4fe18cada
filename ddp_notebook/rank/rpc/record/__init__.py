"""Recording of RPC.

rpc_recorder  remote calls as rows, on both sides
references    remote references as rows
contexts      distributed autograd as rows
call_stack    current remote call and context of a thread
"""
