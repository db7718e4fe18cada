"""Which starter was asked for."""

from __future__ import annotations

from ddp_notebook.launch.options import StartOptions
from ddp_notebook.launch.starters import slurm
from ddp_notebook.launch.starters.base import Starter


def choose(options: StartOptions) -> Starter | None:
    """The starter of the tasks that a session's ranks are to be in; None: its hosts need none.

    Raises:
        UsageError: what was asked for cannot be.
    """
    if options.slurm is not None:
        return slurm.starter(options.slurm)
    return None
