"""The job that this notebook looks at: what magics without a name mean."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from ddp_notebook.on_rank import refuse_on_rank
from ddp_notebook.registry import finding
from ddp_notebook.run.groups.diagnosis import verdict
from ddp_notebook.run.interrupted import OF_FUNCTIONS, tells_interrupt
from ddp_notebook.run.kernel import ipython
from ddp_notebook.run.output.card import as_html, as_text
from ddp_notebook.run.output.outlet import new_id
from ddp_notebook.run.output.sink import Handle, of_this_cell
from ddp_notebook.torchrun.job import TorchrunJob
from ddp_notebook.widgets import ended

if TYPE_CHECKING:
    from ddp_notebook.torchrun.job import TorchrunJob


HANG_AFTER_S = 10.0  # that a rank waits in an operation before it is shown who waits for whom
_LOOK_S = 2.0
_log = logging.getLogger(__name__)


class JobCard:
    """Looks at a job every two seconds, in a thread, and shows what it waits for. Made in the main thread, in the cell
    where it is to stand; in a terminal, where nothing can be changed later, each state is told once.

    Args:
        job: is looked at until it is closed.
    """

    def __init__(self, job: TorchrunJob) -> None:
        self._job = job
        self._said = ""
        self._sink = of_this_cell()
        self._handle = Handle(self._sink, new_id()) if self._sink.can_update else None
        threading.Thread(target=self._run, name="ddp-job-card", daemon=True).start()

    def _run(self) -> None:
        while not self._job.waits_for_end(_LOOK_S):
            try:
                self._look()
            except Exception:
                _log.info("the hang card of a job is as it was", exc_info=True)
        self._show("", _EMPTY)

    def _look(self) -> None:
        run = self._job.round
        if run is None or not run.there:
            self._show("", _EMPTY)
            return
        views = self._job.look()
        longest = max((view.since_s for view in views.values()), default=0.0)
        if longest < HANG_AFTER_S:
            self._show("", _EMPTY)
            return
        why = verdict(views)
        data = {"text/plain": as_text(views, longest, why), "text/html": as_html(views, longest, why)}
        self._show(why or "?", data, again=True)

    def _show(self, why: str, data: dict[str, str], *, again: bool = False) -> None:
        if why == self._said and not (again and self._handle is not None):
            return
        self._said = why
        if self._handle is not None:
            self._handle.update(data)
        elif why:
            self._sink.write("stderr", data["text/plain"] + "\n")


_EMPTY = {"text/plain": "", "text/html": ""}


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
        others = {one.name for one in finding.everything() if one.kind == finding.TORCHRUN}
        if not others or (name and name not in others):
            return _current
    found = finding.find(name, finding.TORCHRUN)
    if _current is not None and _current.key == found.key and _current.is_running:
        return _current
    from ddp_notebook.torchrun.job import TorchrunJob

    job = become(TorchrunJob(found.key, found.name, take_over=take_over))
    job.wait_for_ranks()
    return job


def become(job: TorchrunJob) -> TorchrunJob:
    """This one is looked at from now on, and the one before no more."""

    global _current
    before, _current = _current, job
    if before is not None:
        before.close()
    ended.keep(None)
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
        ended.keep(left)
    return before.stop()
