"""What starts tasks on other machines, each of which becomes an outpost and calls in.

    base         what a starter must be able to do
    choice       which one was asked for
    slurm        Slurm, as a job of its own or in the allocation that the notebook is in
    slurm_queue  what Slurm's commands say of a job
    mpi          mpirun
    profile      a profile of ipyparallel's, with whatever launcher it names
    launchers    ipyparallel's launchers: the one place that knows their insides
    client       a cluster of ipyparallel's that runs already
    tasks        the tasks of one session, from their start to their end

A starter knows nothing of ranks: it runs one command as often as it was asked, tells how that goes, and ends it.
"""
