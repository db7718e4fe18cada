"""All that runs inside a rank.

    engine      the rank's process: an ipyparallel engine whose main thread forms groups and runs cells
    agent       a thread that answers the notebook even while the main thread is stuck
    group       take a place in a process group

    inbox       where cells come in
    runner      one cell, with everything that ipykernel does around one
    guards      what a cell may not do, and what it may not leave behind
    asking      `input()` and `getpass()`, asked in the notebook
    tutorials   scripts' own `init_process_group` and `spawn`
    where       what the main thread is in, in the user's words
    streams     text on the pipes behind fd 1 and 2, and the marks in it
    comms       the rank's half of widgets
    values      variables as bytes

    kernel_api  every private interface of ipykernel that a rank needs, in one place

Imports nothing of the notebook's side.
"""
