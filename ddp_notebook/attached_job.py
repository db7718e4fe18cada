"""The job that this notebook looks at: what magics without a name mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddp_notebook.on_rank import refuse_on_rank
from ddp_notebook.registry import lookup
from ddp_notebook.run import ended_recording
from ddp_notebook.run.interrupted import OF_FUNCTIONS, tells_interrupt
from ddp_notebook.run.notebook_kernel import ipython

if TYPE_CHECKING:
    from ddp_notebook.torchrun.job import TorchrunJob

_current: TorchrunJob | None = None


def current() -> TorchrunJob | None:
    """The one that was attached last, until it is let go."""
    return _current


@tells_interrupt(OF_FUNCTIONS["attach_job"])
def attach_job(name: str = "", *, take_over: bool = False) -> TorchrunJob:
    """Look at a job of torchrun's whose script runs under `-m ddp_notebook.attach`. The job goes on as if nobody did.

    Args:
        name: of the job, or its stem; "": the only one that is there. If no job runs, the one that this notebook has
            shown last is returned, for its logs and its recordings.
        take_over: have another notebook leave that looks at it.

    Raises:
        UsageError: there is no such job, or several; or another notebook looks at it.

    Example:
        >>> attach_job("no such job")
        Traceback (most recent call last):
        ddp_notebook.errors.UsageError: cannot attach to 'no such job': ...
    """
    refuse_on_rank("ranks attach to no job: call attach_job")
    if _current is not None and not _current.is_running and name in ("", _current.name):
        others = {one.name for one in lookup.everything() if one.kind == lookup.TORCHRUN}
        if not others or (name and name not in others):
            return _current
    found = lookup.find(name, lookup.TORCHRUN)
    if _current is not None and _current.key == found.key and _current.is_running:
        return _current
    from ddp_notebook.torchrun.job import TorchrunJob

    job = become(TorchrunJob(found.key, found.name, take_over=take_over))
    job.wait_for_ranks()
    return job


def become(job: TorchrunJob) -> TorchrunJob:
    """This one is looked at from now on, and the one before no more."""
    from ddp_notebook.torchrun.job_card import JobCard

    global _current
    before, _current = _current, job
    if before is not None:
        before.close()
    ended_recording.keep(None)
    JobCard(job)
    return job


def let_go() -> str:
    """Look at no job any more; what it has recorded is shown until there are other ranks. Returns what was done, in
    words."""
    global _current
    before, _current = _current, None
    if before is None:
        return ""
    if ipython() is not None and (left := before.left()) is not None:
        ended_recording.keep(left)
    return before.stop()
