"""Start tasks on other machines, each of which becomes an outpost and connects to the notebook.

    starter              interface of all starters
    choice               selects the starter from the options
    slurm                Slurm: a new job, or the allocation of the notebook
    slurm_queue          the state of a job from Slurm commands
    mpi                  mpirun
    profile              an ipyparallel profile, with any launcher
    launchers            ipyparallel launchers: the only module that depends on their internals
    ipyparallel_cluster  a running ipyparallel cluster
    tasks                the tasks of one session, from their start to their end

A starter does not know about ranks: it runs one command a given number of times, reports its state, and ends it.
"""
