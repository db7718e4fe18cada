"""How ranks come to exist: which rank on which host and device, and how they end.

    cluster       the interface of the processes of one session, of its hosts, and of how both come to be
    direct        its implementation in the process that has the hosts, with the wire to the ranks
    forming       the group: formed at the start, and anew
    membership/   how its processes come, and where those of a lost host go
    process       one process of a session, which of them has which rank, and how one ended
    options       the table of options of a start, and the classes that hold their values
    option_kinds  how the value of each kind of option is written, and its limits
    start_line    the parser of `%ddp_start`, made from the table, with the defaults file
    placement     which rank gets which host and device
    devices       the GPUs of a host, found without CUDA
    environment   what a rank inherits
    hosts         the hosts of one session
    warm          the host server that is started ahead of time
    host/         the process on each host that forks ranks, and its owner's side
    transports/   how a host is reached: this machine, ssh, or it calls in
    starters/     what starts tasks elsewhere that call in
    elastic/      agents of torchrun's, and what ends them
    sync/         the notebook's folder on hosts that do not share it
    keep/         sessions that outlive their notebook
    preflight/    hosts side by side before a group forms, and whether they reach each other
    defaults/     the file with a site's default options
    store         the rendezvous store, a process of its own
    engines       ipyparallel's side: the ranks' engines, and a controller once somebody asks for it
    controller    that controller, nine processes
    client        ipyparallel's client
    client_calls  calls of that client that wait, and those of dead ranks
    processes     identity of processes, and how to end them
    outbox        sending on a stream without a wait, where the other end may be stopped
    rank_log      all that a rank wrote, on disk
    receipts      acknowledge displays and widget messages to the ranks
    preemption    a machine is about to be taken away: loops save and end

Nothing outside this folder knows how ranks were started, or looks at their processes: it asks the cluster, and that
asks the host server.
"""
