"""How ranks come to exist: which rank on which host and device, the process that forks them, and how they end.

    options      what `%ddp_start` was asked for
    placement    which rank gets which device
    devices      the GPUs of a host, found without CUDA
    environment  what a rank inherits
    warm         the host server that is started ahead of time
    host         a host server as the notebook sees it      ── framing ──┐
    host_server  the process that forks ranks               ─────────────┘
    preload      what it imports, and knows about its host
    pipes        between it and each rank: cells in, text out
    child        the first steps of a forked or spawned process
    store        the rendezvous store, a process of its own
    controller   ipyparallel's controller
    processes    identity of processes, and how to end them

Nothing outside this folder knows how ranks were started.
"""
