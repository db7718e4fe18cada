"""A message while a cell runs: the memory of one rank alone grows from step to step."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ddp_notebook.run.session_hooks import SessionFeature

if TYPE_CHECKING:
    from ddp_notebook.messages.ranks import RunCell
    from ddp_notebook.run.session_parts import SessionParts

_log = logging.getLogger(__name__)
_EVERY_S = 5.0  # the ranks send one sample of their memory per second


class GrowingMemory(SessionFeature):
    """Reports once per cell that the memory of one rank alone grows during its steps."""

    def __init__(self, parts: SessionParts) -> None:
        super().__init__(parts)
        self._cell = 0  # the last cell that has begun
        self._told: set[int] = set()  # cells
        self._look_at = time.monotonic() + _EVERY_S

    def cell_begins(self, cell: RunCell) -> None:
        self._cell = cell.cell

    def notices(self) -> Sequence[str]:
        try:
            return self._notices()
        except Exception:  # a notice must not end the cell
            _log.exception("looking for growing memory failed")
            return ()

    def _notices(self) -> Sequence[str]:
        if time.monotonic() < self._look_at:
            return ()
        self._look_at = time.monotonic() + _EVERY_S
        recordings = self.parts.hooks.features.get("recording")
        if recordings is None:
            return ()
        from ddp_notebook.observe.report.memory_growth import growing_in_last_cell

        recording = recordings.observer.recording
        with recording._as_it_is():  # the cell is running, so its ranks cannot send their last rows
            found = growing_in_last_cell(recording)
        if found is None or found[0] != self._cell or found[0] in self._told:
            return ()
        cell, growth = found
        self._told.add(cell)
        return (f"the resident memory of rank {growth.rank} alone grows: {growth} so far. %ddp_memory shows the parts",)
