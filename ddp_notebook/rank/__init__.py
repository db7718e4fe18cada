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

    recorder    every collective, send and receive, as it happens (calls: what is kept of one)
    origin      whose call one is, and from which line
    guard       do all ranks call the same?
    release     ends what the main thread waits in
    connections gloo's sockets, cut and made anew behind the groups (sockets: told by their ports)
    network     ties these together
    keeping     destroyed groups live on for a while
    progress    optimizer steps of a cell
    check       what is to agree between ranks (entries: of which parts)
    copying     variables for a replaced rank

    recording   what a rank records, put together
    tape        what the threads that train leave behind
    previews    small copies of tensors
    training    the stretches of a step (buckets, comm_hooks: of DDP)
    metrics     `log`, and variables that are watched
    resources   memory and load
    gpu_times   when work on a GPU began and ended
    rows        records made into rows
    drain       the recorder's thread
    profile     torch's profiler around a cell
    solo        a cell on one rank alone

    kernel_api  every private interface of ipykernel that a rank needs, in one place

Imports nothing of the notebook's side.
"""
