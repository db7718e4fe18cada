"""How ranks come to exist: which rank on which host and device, and how they end.

    cluster      the processes of one session, and the wire to the ranks
    options      what `%ddp_start` was asked for
    placement    which rank gets which device
    devices      the GPUs of a host, found without CUDA
    environment  what a rank inherits
    warm         the host server that is started ahead of time
    host/        the process on each host that forks ranks, and its owner's side
    store        the rendezvous store, a process of its own
    controller   ipyparallel's controller
    client       ipyparallel's client
    processes    identity of processes, and how to end them

Nothing outside this folder knows how ranks were started.
"""
