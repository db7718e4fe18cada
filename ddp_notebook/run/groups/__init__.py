"""The ranks as one group: what they wait in, and how they come together again.

ranks           methods of `session.ranks`: heal, resize, reform, fault
liveness        which ranks live, and what is said where one does not
probe           what each rank is doing: asked of it, or found out
busy_cells      which cells keep ranks from answering
rank_states     the same as the table of `%ddp_status`
diagnosis       who waits for whom, in one sentence: the text of the hang card
rpc_waits       what ranks wait for and serve by RPC, in words
recovery        after a cell that failed: must the group be formed anew?
healing         replacing ranks that died, with the variables of a living one; forming the group when the user asks
"""
