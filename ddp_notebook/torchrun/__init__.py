"""torchrun jobs in a notebook: jobs of a shell that it attaches to, and jobs that it starts.

    job             one job: its ranks over all attempts, its recording, report and monitor; used by magics
    rounds          the attempts of a job, and the ranks of each
    member          one rank's process: its connection and its last message
    monitor_source  state of a job for monitors and the hang card
    job_card        the hang card of a job, in the cell that attached to it
    output_pipes    reads the output of the job's ranks, rank by rank
    feature         declares `%ddp_torchrun`
    start_job       `%ddp_torchrun`: a job whose agents are started here, and end with the kernel

It finds ranks by their entries in `registry`, and sends messages over the wire, as to ranks of a session.
"""
