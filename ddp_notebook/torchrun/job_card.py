"""The hang card of a job, in the cell that has attached to it, shown while its ranks make no progress."""

from __future__ import annotations

import logging
import threading

from ddp_notebook.run.groups.diagnosis import verdict
from ddp_notebook.run.output.card import as_html, as_text
from ddp_notebook.run.output.display_target import DisplayHandle, of_this_cell
from ddp_notebook.run.output.rate_limiter import new_id
from ddp_notebook.torchrun.job import TorchrunJob

HANG_AFTER_S = 10.0  # a card is shown when a rank has waited in an operation for this long
_LOOK_S = 2.0
_log = logging.getLogger(__name__)


class JobCard:
    """Checks a job every two seconds, in a thread, and shows the operations that it waits for.

    Create it in the main thread, in the cell of the card. A terminal cannot update output, so each state is printed
    once.

    Args:
        job: is checked until it is closed.
    """

    def __init__(self, job: TorchrunJob) -> None:
        self._job = job
        self._said = ""
        self._sink = of_this_cell()
        self._handle = DisplayHandle(self._sink, new_id()) if self._sink.can_update else None
        threading.Thread(target=self._run, name="ddp-job-card", daemon=True).start()

    def _run(self) -> None:
        while not self._job.waits_for_end(_LOOK_S):
            try:
                self._update()
            except Exception:
                _log.info("the hang card of a job is as it was", exc_info=True)
        self._show("", _EMPTY)

    def _update(self) -> None:
        run = self._job.round
        if run is None or not run.there:
            self._show("", _EMPTY)
            return
        views = self._job.inspect()
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
