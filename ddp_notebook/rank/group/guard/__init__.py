"""Guard: compare the calls of all ranks before the user's collectives, sends and receives start.

feature             adds the guard to a rank
guard               compares calls, and describes differences
order               compares all calls, and what they belong to, without a wait
ledger              words of all calls, in shared memory
inputs              checks the tensors of a call for results that would be wrong
board               where the ranks of a group exchange the compared data
message_comparison  compares sends with receives
memory_board        a board in shared memory, on one machine
"""
