"""The attached torchrun job, which magics without a job name use."""

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
    """Return the job that was attached last, or None after a detach."""
    return _current


@tells_interrupt(OF_FUNCTIONS["attach_job"])
def attach_job(name: str = "", *, take_over: bool = False) -> TorchrunJob:
    """Attach to a torchrun job whose script runs under `-m ddp_notebook.attach`. The job is not affected.

    Args:
        name: name of the job, or its stem; "": the only job. If no job runs, return the last attached one, for its logs
            and recordings.
        take_over: detach another notebook from the job.

    Raises:
        UsageError: no job has this name, or several do, or another notebook is attached.

    Example:
        >>> attach_job("no such job")
        Traceback (most recent call last):
        ddp_notebook.errors.UsageError: cannot attach to 'no such job': ...
    """
    refuse_on_rank("attach_job()")
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
    """Make this the attached job, and detach from the previous one."""
    from ddp_notebook.torchrun.job_card import JobCard

    global _current
    before, _current = _current, job
    if before is not None:
        before.close()
    ended_recording.keep(None)
    JobCard(job)
    return job


def let_go() -> str:
    """Detach from the job, and return a line that reports it. Its recording stays available until other ranks start."""
    global _current
    before, _current = _current, None
    if before is None:
        return ""
    if ipython() is not None and (left := before.left()) is not None:
        ended_recording.keep(left)
    return before.stop()
