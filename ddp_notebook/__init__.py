"""A Jupyter notebook as the controller of a PyTorch process group.

    %load_ext ddp_notebook
    %ddp_start 4

    %%on_all_ranks
    x = torch.full((2,), float(rank), device=device)
    dist.all_reduce(x)
    x

In scripts: `start(4)`, `check(hosts=...)`, `current()`, `Session.run`, `Session.pull`, `Session.push`, `Session.stop`.
All errors of `ddp_notebook.errors` can be imported from this package.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from ddp_notebook.errors import (
    CannotWriteError,
    CellFailedHereError,
    CellTimeoutError,
    ClientError,
    DDPNotebookError,
    HostError,
    JobCancelledError,
    JobFailedError,
    MissingBuildError,
    MissingPackageError,
    MissingRecordingError,
    NoSessionError,
    RankDiedError,
    RankError,
    RecordingError,
    SessionBrokenError,
    SessionExistsError,
    StartError,
    StartTimeoutError,
    UsageError,
)
from ddp_notebook.version import __version__ as __version__

if TYPE_CHECKING:
    from types import FrameType

    from IPython.core.interactiveshell import InteractiveShell

    from ddp_notebook.api import check, start
    from ddp_notebook.attached_job import attach_job
    from ddp_notebook.launch.options import Client, Keep, Mpi, Profile, Slurm, Ssh
    from ddp_notebook.launch.preflight.table import HostTable
    from ddp_notebook.messages.record_options import RecordOptions
    from ddp_notebook.observe.report.report import Report
    from ddp_notebook.record import log
    from ddp_notebook.run.cells.result import CellResult
    from ddp_notebook.run.consistency.agreement import Agreement
    from ddp_notebook.run.record.notebook_recording import Recording, load
    from ddp_notebook.run.sharding.memory import Memory
    from ddp_notebook.run.sharding.placements import Placements, TensorPlacement
    from ddp_notebook.run.values.values_by_rank import RankValues
    from ddp_notebook.session import Session, current
    from ddp_notebook.status import Status
    from ddp_notebook.survive_loop import survive
    from ddp_notebook.torchrun.job import TorchrunJob

__all__ = [
    "Agreement",
    "CannotWriteError",
    "CellFailedHereError",
    "CellResult",
    "CellTimeoutError",
    "Client",
    "ClientError",
    "DDPNotebookError",
    "HostError",
    "HostTable",
    "JobCancelledError",
    "JobFailedError",
    "Keep",
    "Memory",
    "MissingBuildError",
    "MissingPackageError",
    "MissingRecordingError",
    "Mpi",
    "NoSessionError",
    "Placements",
    "Profile",
    "RankDiedError",
    "RankError",
    "RankValues",
    "RecordOptions",
    "Recording",
    "RecordingError",
    "Report",
    "Session",
    "SessionBrokenError",
    "SessionExistsError",
    "Slurm",
    "Ssh",
    "StartError",
    "StartTimeoutError",
    "Status",
    "TensorPlacement",
    "TorchrunJob",
    "UsageError",
    "attach_job",
    "attach_session",
    "check",
    "current",
    "load",
    "log",
    "start",
    "survive",
]

# Ranks import this package, too. Import the modules of the notebook only when they are used.
_LAZY = {
    "Agreement": "ddp_notebook.run.consistency.agreement",
    "CellResult": "ddp_notebook.run.cells.result",
    "Client": "ddp_notebook.launch.options",
    "HostTable": "ddp_notebook.launch.preflight.table",
    "Keep": "ddp_notebook.launch.options",
    "Memory": "ddp_notebook.run.sharding.memory",
    "Mpi": "ddp_notebook.launch.options",
    "Placements": "ddp_notebook.run.sharding.placements",
    "Profile": "ddp_notebook.launch.options",
    "RankValues": "ddp_notebook.run.values.values_by_rank",
    "RecordOptions": "ddp_notebook.messages.record_options",
    "Recording": "ddp_notebook.run.record.notebook_recording",
    "Report": "ddp_notebook.observe.report.report",
    "Session": "ddp_notebook.session",
    "Slurm": "ddp_notebook.launch.options",
    "Ssh": "ddp_notebook.launch.options",
    "Status": "ddp_notebook.status",
    "TensorPlacement": "ddp_notebook.run.sharding.placements",
    "TorchrunJob": "ddp_notebook.torchrun.job",
    "attach_job": "ddp_notebook.attached_job",
    "attach_session": "ddp_notebook.attach_commands",
    "check": "ddp_notebook.api",
    "current": "ddp_notebook.session",
    "load": "ddp_notebook.run.record.notebook_recording",
    "log": "ddp_notebook.record",
    "start": "ddp_notebook.api",
    "survive": "ddp_notebook.survive_loop",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)


# Record the ranks of a torchrun job, see `record`. `python -m ddp_notebook.record` does this itself.
if "DDP_NOTEBOOK_RECORD" in os.environ and "RANK" in os.environ and "ddp_notebook.record" not in sys.orig_argv:
    from ddp_notebook import record

    record.start_if_asked()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register the magics for `%load_ext ddp_notebook`. A background thread imports torch and the start modules."""
    from ddp_notebook.run.interrupted import OF_FUNCTIONS, tells_interrupt

    tells_interrupt(OF_FUNCTIONS["load_ipython_extension"])(_load)(shell)


def _load(shell: InteractiveShell) -> None:
    from ddp_notebook import magics
    from ddp_notebook.launch import warm
    from ddp_notebook.on_rank import refuse_on_rank
    from ddp_notebook.run.cells.interrupt import uninterrupted

    refuse_on_rank("%load_ext ddp_notebook")
    magics.load(shell)
    session = sys.modules.get("ddp_notebook.session")  # do not import it yet
    has_ranks = session is not None and session.current() is not None  # the extension was loaded before
    if warm.is_wanted() and not has_ranks:
        with uninterrupted("interrupted, but the extension is loaded"):
            warm.prepare()
            warm.import_in_background("ddp_notebook.session_commands", "ddp_notebook.launch.start_line")


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """End the ranks and the host server for `%unload_ext ddp_notebook`. `%reload_ext` keeps them."""
    from ddp_notebook import session_commands
    from ddp_notebook.launch import warm
    from ddp_notebook.run import debugging, hints
    from ddp_notebook.session import current

    debugging.unwatch(shell)
    hints.unwatch(shell)
    if _is_reload(shell):
        return
    session = current()
    if session is not None:
        print(session_commands.end(session))
    warm.drop()


def _is_reload(shell: InteractiveShell) -> bool:
    """Return whether `%reload_ext` is unloading the extension."""
    manager: Any = shell.extension_manager
    reload = type(manager).reload_extension.__code__
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not reload:
        frame = frame.f_back
    return frame is not None
