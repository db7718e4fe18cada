"""The running cells of a kept session's driver, in a notebook that only observes the session."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddp_notebook.messages.ranks import RunCell
from ddp_notebook.records.words import format_ranks

if TYPE_CHECKING:
    from ddp_notebook.messages.keeper import RunningCell, Waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignCell:
    """One running cell. `RankProbe` accepts it in place of a `CellRun`."""

    number: int
    told: RunCell
    ranks: list[int]
    pending: list[int]  # ranks on which it has not ended
    began_s: float


class ForeignCells:
    """All running and waiting cells of the driver.

    Args:
        on_prompt: called with the number and the prompt of each cell.
    """

    def __init__(self, on_prompt: Callable[[int, str], object]) -> None:
        self._on_prompt = on_prompt
        self._running: list[ForeignCell] = []
        self._waiting: list[Waiting] = []

    def update(self, running: list[RunningCell], waiting: list[Waiting]) -> None:
        """Replace the cells by those in the keeper's message. Called in the thread that reads it."""
        now = time.monotonic()
        for one in running:
            if one.told.file:
                self._on_prompt(one.told.cell, f"In [{one.told.execution_count}]")
        self._waiting = waiting
        self._running = [
            ForeignCell(
                number=one.told.cell, told=one.told, ranks=one.ranks, pending=one.pending, began_s=now - one.for_s
            )
            for one in running
        ]

    @property
    def under_way(self) -> ForeignCell | None:
        """Return the newest running cell."""
        running = self._running
        return running[-1] if running else None

    def rows(self) -> list[tuple[RunCell, str, str, str]]:
        """Return the code, ranks, state and seconds of each cell."""
        now = time.monotonic()
        found = [(one.told, format_ranks(one.ranks), "running", f"{now - one.began_s:.1f}") for one in self._running]
        for one in self._waiting:
            found.append((one.told, "" if one.ranks is None else format_ranks(one.ranks), "waiting", ""))
        return found
