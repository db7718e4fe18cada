"""Jobs of torchrun's in a notebook: those of a shell, which it looks at, and those that it starts itself.

    job             one job: its ranks as they come and go, its recording, report, monitor; what magics use
    rounds          the attempts of a job, and the ranks of each
    member          one rank's process: in at its door, what it has said last
    monitor_source  what a monitor and the hang card ask of a job
    job_card        the hang card of a job, which stands in the cell that attached to it
    current         the job that this notebook looks at
    output_pipes    what the ranks of such a job write, read rank by rank
    feature         declares `%ddp_torchrun`
    start_job       `%ddp_torchrun`: a job whose agents are started here, and end with the kernel

It knows ranks by their entries in `registry`, and speaks to them by the wire, as to those of a session.
"""
