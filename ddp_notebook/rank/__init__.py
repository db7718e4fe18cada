"""All that runs inside a rank.

    engine      the rank's process: an ipyparallel engine whose main thread forms groups and runs cells
    agent       a thread that answers the notebook even while the main thread is stuck
    group       take a place in a process group
    runner      one cell, with everything that ipykernel does around one
    streams     text on the pipes behind fd 1 and 2, and the marks that say which cell it belongs to
    values      variables as bytes
    kernel_api  every private interface of ipykernel that a rank needs, in one place

Imports nothing of the notebook's side.
"""
