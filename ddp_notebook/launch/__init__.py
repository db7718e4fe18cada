"""Start and end of ranks: the host and device of each rank, and all processes of a session.

    cluster        interface: the processes of one session, its hosts, and its startup
    direct         the cluster in the process that owns the hosts and the wire to the ranks
    forming        forms the process group, at the start and again later
    membership/    starts and replaces processes, and moves the ranks of lost hosts
    process        one process of a session, the table of ranks, and exit causes in words
    options        the table of options of a start, and the classes that hold their values
    option_kinds   how the value of each kind of option is written, and its limits
    start_line     the parser of `%ddp_start`, made from the table, with the defaults file
    placement      assigns hosts and devices to ranks
    devices        the GPUs of a host, found without CUDA
    environment    environment variables of ranks
    hosts          the hosts of one session
    warm           the host server that is started ahead of time
    host/          the process on each host that forks ranks, and its owner's side
    transports/    connections to hosts: local, ssh, or a callback from an outpost
    starters/      start outposts on other hosts through Slurm, MPI or ipyparallel
    elastic/       torchrun agents, and how to end them
    sync/          upload the notebook's folder to hosts that do not share it
    keep/          sessions that outlive their notebook
    preflight/     compare hosts before a group forms, and test their connections
    defaults/      the file with a site's default options
    store_process  the rendezvous store, in its own process
    engines        ipyparallel engines of the ranks, and a controller on demand
    controller     the ipyparallel controller, nine processes
    client         the ipyparallel client
    client_calls   calls of that client: waits, and errors for dead ranks
    processes      identity of processes, and how to end them
    outbox         non-blocking sends on a stream whose peer may be stopped
    rank_log       the complete output of a rank, on disk
    receipts       acknowledge displays and widget messages to the ranks
    preemption     the machine will be taken away soon: loops save and end

Code outside this folder does not depend on how ranks were started, and does not inspect their processes. It calls the
cluster, which calls the host servers.
"""
