"""View under the output of a running cell: decides when a compact view appears, and redraws views."""

from __future__ import annotations

import logging
import re
import time
from typing import TYPE_CHECKING

import numpy as np

from ddp_notebook.errors import MissingBuildError
from ddp_notebook.records.schema import ORIGINS

if TYPE_CHECKING:
    from ddp_notebook.observe.tables.recorded import RecordedTables
    from ddp_notebook.run.output.display_target import DisplayTarget
    from ddp_notebook.widgets.view_placement import ViewPlacement

_AFTER_S = 1.0  # a shorter cell needs no view
_LOOK_S = 0.2
_HOLD_S = 0.4  # longest time that output waits for the rows of the step that printed it
_QUIET_S = 1.0  # output waits only if nothing was printed for this long
# Code that may train. Only output of such code waits for a view.
_MAY_TRAIN = re.compile(
    r"(?<![.\w])log\(|\bbackward\(|\.step\(|\b\w*(train|fit|epoch|learn)\w*\(|\bmain\(|^\s*%run\b", re.MULTILINE | re.I
)
_SYNCHRONISES = [ORIGINS.index(name) for name in ("ddp", "ddp hook", "fsdp")]
_MOST_ROWS = 2000  # calls that are searched for such a synchronisation
_log = logging.getLogger(__name__)


class UnderCell:
    """View under one cell. Implements `run.cells.watch.Beside`.

    Args:
        placing: Owner of the views.
        recording: Recording of the session.
        code: Code of the cell.
        may_come: Show a compact view under the cell as soon as there is data.
        elsewhere: Output of a cell that runs in another thread than the main thread; None to display directly.
    """

    def __init__(
        self,
        placing: ViewPlacement,
        recording: RecordedTables,
        code: str,
        *,
        may_come: bool,
        elsewhere: DisplayTarget | None = None,
    ) -> None:
        self._placing = placing
        self._elsewhere = elsewhere
        self._recording = recording
        self._began_s: float | None = None  # time of the first `look`, when the cell starts to run
        self._looked_s = 0.0
        rings = self._recording.store.rings
        self._ends = {name: rings[name].end for name in ("metric", "call")}
        self._may_train = may_train(code)
        self._is_wanted = False
        self._is_decided = not may_come
        self.is_shown = self._has_failed = False

    def holds(self, waits_s: float, quiet_s: float) -> bool:
        """Return whether output waits, so that the view appears above it and not between its lines.

        Output never waits after a view is shown, or if no view may appear.
        """
        if self._is_decided or self._has_failed:
            return False
        if self._is_wanted:
            return True  # until `_decide` shows the view
        if not self._may_train:
            return False
        is_new = self._began_s is None or time.monotonic() < self._began_s + _AFTER_S
        return is_new or (quiet_s > _QUIET_S and waits_s < _HOLD_S)

    def look(self, cell: int) -> None:
        now_s = time.monotonic()
        if self._has_failed or now_s < self._looked_s + _LOOK_S:
            return
        self._looked_s = now_s
        self._began_s = self._began_s or now_s
        try:
            self._placing.look()
            if not self._is_decided:
                self._decide(cell, now_s - self._began_s)
        except MissingBuildError:  # %ddp_monitor reports it
            self._is_decided = True
        except Exception:  # an error of the view must not stop the cell
            self._has_failed = True
            _log.exception("no view is shown under the cell, and earlier views are not updated")

    def end(self, cell: int) -> None:
        try:
            self._placing.end(cell)
        except Exception:
            _log.exception("the view under the cell could not be updated")

    def _decide(self, cell: int, runs_s: float) -> None:
        if not self._is_wanted and self._has_something(cell):
            self._is_wanted = True
            if self._elsewhere is None and not self._placing.draws_html:
                self._placing.prepare_picture()
        if self._is_wanted and runs_s > _AFTER_S:
            self._is_decided = True
            self._placing.show_under(cell, self._elsewhere)
            self.is_shown = True

    def _has_something(self, cell: int) -> bool:
        recording = self._recording
        metrics, self._ends["metric"], _ = recording.follow("metric", self._ends["metric"], _MOST_ROWS)
        if (metrics["cell"] == cell).any():
            return True
        end = recording.store.rings["call"].end
        calls, _, _ = recording.follow("call", max(self._ends["call"], end - _MOST_ROWS))
        self._ends["call"] = end
        return bool((np.isin(calls["origin"], _SYNCHRONISES) & (calls["cell"] == cell)).any())


def may_train(code: str) -> bool:
    """Return whether a cell with this code may train.

    Example:
        >>> may_train("loss.backward()"), may_train("train(100)"), may_train("print(math.log(3))")
        (True, True, False)
    """
    return _MAY_TRAIN.search(code) is not None
