"""Which starter was asked for."""

from __future__ import annotations

from ddp_notebook.launch.options import StartOptions
from ddp_notebook.launch.starters import slurm
from ddp_notebook.launch.starters.base import Starter
from ddp_notebook.launch.starters.client import Client
from ddp_notebook.launch.starters.mpi import Mpi
from ddp_notebook.launch.starters.profile import Profile


def choose(options: StartOptions) -> Starter | None:
    """The starter of the tasks that a session's ranks are to be in; None: its hosts need none.

    Raises:
        UsageError: what was asked for cannot be.
    """
    if options.slurm is not None:
        return slurm.starter(options.slurm)
    if options.mpi is not None:
        return Mpi(options.mpi)
    if options.profile is not None:
        return Profile(options.profile, options.world_size, options.python)
    if options.client is not None:
        return Client(options.client, options.python)
    return None
