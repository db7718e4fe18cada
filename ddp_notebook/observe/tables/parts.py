"""Parts of a recording: the rows of one cell, or others that a subclass selects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ddp_notebook.observe.tables.matching import RowSource
from ddp_notebook.observe.tables.ring_buffer import select
from ddp_notebook.records.schema import TABLES, Rows


class Bounded(RowSource, Protocol):
    """A recording that may have lost rows."""

    @property
    def dropped(self) -> Mapping[int, int]:
        """Number of rows that were dropped on the way to the notebook, by rank."""

    @property
    def findings(self) -> Mapping[int, Sequence[str]]:
        """Findings about the training steps of cells; () explains only why ranks train apart."""

    @property
    def same_draws(self) -> Mapping[int, Sequence[str]]:
        """Sentences about equal random numbers of ranks, by cell."""

    @property
    def same_inputs(self) -> Mapping[int, list[list[int]]]:
        """Groups of ranks that had the same inputs, by cell; []: the inputs of some steps were the same."""


class RecordingPart:
    """A recording with fewer rows: a subclass overrides `rows`.

    Args:
        recording: the complete recording.
    """

    def __init__(self, recording: RowSource) -> None:
        self._recording = recording
        self.world_size = recording.world_size
        self.hosts: Sequence[str] = recording.hosts
        self.baseline: Mapping[str, Any] | None = recording.baseline
        self.prompts: Mapping[int, str] = recording.prompts

    def rows(self, table: str) -> Rows:
        return self._recording.rows(table)

    def text(self, number: int) -> str:
        return self._recording.text(number)

    def group_of(self, number: int) -> Mapping[str, Any]:
        return self._recording.group_of(number)

    def clock_error_ns(self, rank: int) -> int:
        return self._recording.clock_error_ns(rank)


class CellPart(RecordingPart):
    """One cell of a recording, as it is now. Tables without cells are complete.

    Each table is read once, because each read copies its rows.

    Args:
        recording: the complete recording.
        cell: number of the cell.
    """

    def __init__(self, recording: Bounded, cell: int) -> None:
        super().__init__(recording)
        self._cell = cell
        self._tables: dict[str, Rows] = {}
        self.dropped: Mapping[int, int] = recording.dropped
        self.findings: Mapping[int, Sequence[str]] = recording.findings
        self.same_draws: Mapping[int, Sequence[str]] = recording.same_draws
        self.same_inputs: Mapping[int, list[list[int]]] = recording.same_inputs

    def rows(self, table: str) -> Rows:
        found = self._tables.get(table)
        if found is None:
            found = super().rows(table)
            # the other side of a call may belong to another cell
            if "cell" in (TABLES[table].names or ()) and table != "rpc":
                own = found["cell"] == self._cell
                found = found if own.all() else select(found, own)
            self._tables[table] = found
        return found
