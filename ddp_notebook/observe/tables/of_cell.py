"""The rows of one cell, each table read once: each time that rows are read they are copied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ddp_notebook.observe.tables.matching import RowSource
from ddp_notebook.records.schema import TABLES, Rows


class Bounded(RowSource, Protocol):
    """A recording that may have lost rows."""

    @property
    def dropped(self) -> Mapping[int, int]:
        """Rows that were lost on their way here, by rank."""


class OfCell:
    """One cell of a recording, as it is now. Tables without cells are whole.

    Args:
        recording: the whole of it.
        cell: the number of the cell.
    """

    def __init__(self, recording: Bounded, cell: int) -> None:
        self._recording = recording
        self._cell = cell
        self._tables: dict[str, Rows] = {}
        self.world_size = recording.world_size
        self.hosts: Sequence[str] = recording.hosts
        self.baseline: Mapping[str, Any] | None = recording.baseline
        self.prompts: Mapping[int, str] = recording.prompts
        self.dropped: Mapping[int, int] = recording.dropped

    def rows(self, table: str) -> Rows:
        found = self._tables.get(table)
        if found is None:
            found = self._recording.rows(table)
            if "cell" in (TABLES[table].names or ()) and table != "rpc":  # its other side may be of another cell
                own = found["cell"] == self._cell
                found = found if own.all() else found[own]
            self._tables[table] = found
        return found

    def text(self, number: int) -> str:
        return self._recording.text(number)

    def group_of(self, number: int) -> Mapping[str, Any]:
        return self._recording.group_of(number)

    def clock_error_ns(self, rank: int) -> int:
        return self._recording.clock_error_ns(rank)
