"""The ranks as a process group: state, diagnosis of hangs, and recovery.

ranks           methods of `session.ranks`: heal, resize, reform, fault
liveness        liveness checks, and the errors for dead ranks
named_ranks     sets of ranks by dimensions of meshes and by hosts: tp=1, host=gpu2
probe           activity of each rank: from its own answer, or inspected from outside
rank_states     state of each rank as the table of `%ddp_status`; cells that keep ranks from answering
rank_view       activity of one rank, as far as the notebook knows it
diagnosis       which rank waits for which, as a sentence: the text of the hang card
reasons         facts about messages, training loops and stores, for the sentence of a diagnosis
rpc_waits       sentences about RPC calls that ranks wait for or serve
recovery        checks after a failed cell whether the group must be formed again, and does it
healing         replaces dead ranks, copies variables of a living one, forms the group on request
"""
