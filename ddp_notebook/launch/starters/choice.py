"""Choose the starter of a session's tasks."""

from __future__ import annotations

from ddp_notebook.launch.options import Client, Mpi, Profile, Slurm, StartOptions
from ddp_notebook.launch.starters.starter import Starter


def choose(options: StartOptions) -> Starter | None:
    """Return the starter of the tasks in which the ranks of a session run; None if its hosts need none.

    Raises:
        UsageError: the arguments of the starter are wrong.
    """
    match options.elsewhere:
        case Slurm(arguments=arguments):
            from ddp_notebook.launch.starters import slurm

            return slurm.starter(arguments)
        case Mpi(arguments=arguments):
            from ddp_notebook.launch.starters.mpi import MpiStarter

            return MpiStarter(arguments)
        case Profile(name=name, python=python):
            from ddp_notebook.launch.starters.profile import ProfileStarter

            return ProfileStarter(name, options.world_size, python)
        case Client(cluster=cluster, python=python):
            from ddp_notebook.launch.starters.ipyparallel_cluster import ClientStarter

            return ClientStarter(cluster, python)
    return None
