"""A message while a cell runs: the memory of one rank alone grows from step to step."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ddp_notebook.run.session_hooks import SessionFeature

if TYPE_CHECKING:
    from ddp_notebook.messages.ranks import RunCell
    from ddp_notebook.observe.report.memory_growth import MemoryOfCell
    from ddp_notebook.run.session_parts import SessionParts

_log = logging.getLogger(__name__)
_EVERY_S = 5.0  # the ranks send one sample of their memory per second


class GrowingMemory(SessionFeature):
    """Reports once per cell that the memory of one rank alone grows during its steps."""

    def __init__(self, parts: SessionParts) -> None:
        super().__init__(parts)
        self._memory: MemoryOfCell | None = None  # None: the growth of the running cell was reported
        self._cell = 0
        self._is_begun = False
        self._look_at = time.monotonic() + _EVERY_S

    def cell_begins(self, cell: RunCell) -> None:
        self._cell, self._is_begun, self._memory = cell.cell, False, None

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
        if not self._is_begun:
            from ddp_notebook.observe.report.memory_growth import MemoryOfCell

            self._is_begun, self._memory = True, MemoryOfCell(recordings.observer.recording.store, self._cell)
        if self._memory is None or (growth := self._memory.growing_alone()) is None:
            return ()
        self._memory = None
        return (f"the resident memory of rank {growth.rank} alone grows: {growth} so far. %ddp_memory shows the parts",)
