"""Tables of a recording: rows with times of the notebook's clock, and the meaning of their numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ddp_notebook.errors import UsageError
from ddp_notebook.observe.clock import Clock
from ddp_notebook.observe.tables.meanings import group_of, preview_of, shapes_of
from ddp_notebook.observe.tables.store import Store
from ddp_notebook.observe.views import Metric, Preview
from ddp_notebook.records.codec import Batch
from ddp_notebook.records.names import listed
from ddp_notebook.records.schema import TABLES, TIMES, Rows

_COLUMNS = {
    "ranks": "rank",
    "steps": "step",
    "values": "value",
    "times_ns": "time_ns",
    "cells": "cell",
    "is_given": "is_given",
    "units": "unit",
}


class MetricTable(Mapping[str, Metric]):
    """Metrics of some rows, in the order of the first row with each name.

    Args:
        rows: (n,) of `records.METRIC`.
        texts: returns the texts of numbers.

    Example:
        >>> from ddp_notebook.records.schema import METRIC
        >>> rows = np.zeros(3, METRIC)
        >>> rows["name"], rows["value"] = [2, 1, 2], [5.0, 6.0, 7.0]
        >>> metrics = MetricTable(rows, lambda numbers: [{1: "loss", 2: "accuracy"}[one] for one in numbers.tolist()])
        >>> list(metrics), metrics["accuracy"].values.tolist()
        (['accuracy', 'loss'], [5.0, 7.0])
    """

    def __init__(self, rows: Rows, texts: Callable[[npt.NDArray[Any]], list[str]]) -> None:
        order = np.argsort(rows["name"], kind="stable")
        self._rows = rows[order]
        numbers = self._rows["name"].astype(np.int64)
        begins = np.flatnonzero(np.diff(numbers, prepend=-1)) if len(rows) else np.zeros(0, np.int64)
        ends = np.append(begins[1:], len(rows))
        by_time = np.argsort(order[begins])  # a stable sort keeps the first row of each name in front
        self._begins, self._ends = begins[by_time], ends[: len(begins)][by_time]
        self._places = {name: place for place, name in enumerate(texts(numbers[self._begins]))}

    def __getitem__(self, name: str) -> Metric:
        place = self._places[name]
        rows = self._rows[self._begins[place] : self._ends[place]]
        return Metric(name=name, **{field: rows[column] for field, column in _COLUMNS.items()})

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __repr__(self) -> str:
        return f"<MetricTable: {listed(self)}>" if self else "<Metrics: none>"


@dataclass(frozen=True, slots=True, kw_only=True)
class FormerClock:
    """The former clock of a rank whose new process is on another host."""

    rank: int
    ends: Mapping[str, int]  # index of the first row with the next clock, by table
    clock: Clock


class RecordedTables:
    """Everything that the ranks have recorded, as tables in bounded memory: the oldest rows are dropped first.

    `Recording` adds queries, figures and files for users. Modules below it, including the monitor, use this class.

    Args:
        world_size: number of ranks.
        capacity: number of kept rows, by table of `records.TABLES`; by default 200 MB in total.
        clock: offsets of the ranks' clocks.
    """

    def __init__(
        self, world_size: int, *, capacity: Mapping[str, int] | None = None, clock: Clock | None = None
    ) -> None:
        self.world_size = world_size  # includes removed ranks
        self.present = world_size  # number of ranks without removed ones
        self.hosts: tuple[str, ...] = ()  # present or last machine of each rank; (): one machine, or unknown
        self.clock = clock or Clock()
        self.former: list[FormerClock] = []  # clocks of ranks that moved to other hosts, in the order of the moves
        self.baseline: Mapping[str, Any] | None = None  # measured result of one rank alone
        self.findings: dict[int, tuple[str, ...]] = {}  # findings about training by cell, see `run.findings`
        self.same_draws: dict[int, tuple[str, ...]] = {}  # sentences about equal random numbers of ranks, by cell
        # Groups of ranks that had the same inputs, by cell; []: the inputs of some steps were the same.
        self.same_inputs: dict[int, list[list[int]]] = {}
        self._out_of_memory: dict[int, dict[str, Any]] = {}  # facts of the last error by rank, see `run.sharding`
        self.aside: set[int] = set()  # cells whose rows are hidden
        self.listeners: list[Callable[[Batch], None]] = []  # called with each new batch, in the feeding thread
        self.catch_up: Callable[[], None] | None = None  # requests rows that ranks have recorded and not sent yet
        self._asks_nobody = 0  # number of active `_as_it_is` blocks
        self.store = Store(capacity)
        self.prompts = self.store.prompts
        self._groups: dict[int, dict[str, Any]] = {}

    def __repr__(self) -> str:
        counts = {name: len(ring) for name, ring in self.store.rings.items()}
        words = {"call": "calls", "span": "spans", "metric": "values of metrics"}
        parts = [f"{counts[name]} {word}" for name, word in words.items()]
        if dropped := sum(self.store.dropped.values()):
            parts.append(f"{dropped} rows lost")
        return f"<Recording of {self.world_size} rank{'s' * (self.world_size != 1)}: {', '.join(parts)}>"

    # ---- what comes in

    def _feed(self, batch: Batch) -> None:
        """Add a batch of a rank. Only one thread may call it."""
        self.store.feed(batch)
        for listener in self.listeners:
            listener(batch)

    def _feed_dropped(self, batch: Batch) -> None:
        """Add the remains of a batch that was dropped: its texts, and the number of its rows."""
        self.store.learn(batch)

    def _part_from_clock(self, rank: int) -> None:
        """Start a new clock for a rank. Existing rows keep the former clock."""
        ends = {table: ring.end for table, ring in self.store.rings.items()}
        self.former.append(FormerClock(rank=rank, ends=ends, clock=self.clock.part(rank)))

    def _set_aside(self, cell: int) -> None:
        """Hide the rows of a cell that ran for a comparison only."""
        self.aside.add(cell)

    # ---- rows

    @contextmanager
    def _as_it_is(self) -> Iterator[None]:
        """Request no rows from ranks in the block: use the received ones only."""
        self._asks_nobody += 1
        try:
            yield
        finally:
            self._asks_nobody -= 1

    def rows(self, table: str, since: int = 0) -> Rows:
        """Return a copy of a table's rows, with times on the notebook's clock.

        The order is that of the received batches. If metrics exceed the capacity of the table, the earlier ones are
        thinned.

        Args:
            table: name of a table in `records.TABLES`.
            since: index of the first row; dropped rows are left out.

        Raises:
            UsageError: the table does not exist.
        """
        catch_up = self.catch_up  # read once, because the end of the session resets it
        if catch_up is not None and not self._asks_nobody:
            catch_up()
        return self._metrics_until() if table == "metric" and not since else self.follow(table, since)[0]

    def _metrics_until(self, end: int | None = None) -> Rows:
        """Return a copy of the rows of `metric`, with the thinned ones first.

        Args:
            end: index after the last row; None: all rows.
        """
        rows, ring_end, _ = self.store.rings["metric"].since(0)
        first = ring_end - len(rows)
        if end is not None:
            rows = rows[: max(0, end - first)]
        self._correct("metric", rows, lambda index: index - first)
        earlier, indexes = self.store.earlier.before(first)
        if len(earlier):
            self._correct("metric", earlier, lambda index: int(np.searchsorted(indexes, index)))
            rows = np.concatenate([earlier, rows])
        return rows[~np.isin(rows["cell"], list(self.aside))] if self.aside else rows

    def follow(self, table: str, index: int, most: int | None = None) -> tuple[Rows, int, int]:
        """Return `(new rows for a reader, index for its next call, number of rows that it lost)`.

        Args:
            table: name of a table in `records.TABLES`.
            index: position of the reader, from 0.
            most: limit of rows; None: all.

        Raises:
            UsageError: the table does not exist.
        """
        if table not in TABLES:
            raise UsageError(f"unknown table {table!r}; the tables are {', '.join(TABLES)}")
        rows, end, lost = self.store.rings[table].since(index, most)
        if TIMES[table]:
            first = end - len(rows)
            self._correct(table, rows, lambda index: index - first)
        if self.aside and "cell" in (TABLES[table].names or ()):
            rows = rows[~np.isin(rows["cell"], list(self.aside))]
        return rows, end, lost

    def _correct(self, table: str, rows: Rows, place: Callable[[int], int]) -> None:
        """Convert times to the notebook's clock, in place.

        Args:
            place: returns the position in `rows` of the row with an index; at most 0 for an earlier row.
        """
        begins: dict[int, int] = {}  # position of the first row with the next clock, by rank
        for former in self.former:
            until = max(0, place(former.ends[table]))
            self._shift(table, rows, former.rank, former.clock, slice(begins.get(former.rank, 0), until))
            begins[former.rank] = until
        for rank in self.clock.shifted():
            self._shift(table, rows, rank, self.clock, slice(begins.get(rank, 0), None))

    def _shift(self, table: str, rows: Rows, rank: int, clock: Clock, part: slice) -> None:
        rows = rows[part]
        mine = np.flatnonzero(rows["rank"] == rank)
        for column in TIMES[table] if len(mine) else ():
            rows[column][mine] = clock.to_notebook(rank, rows[column][mine])

    @property
    def metrics(self) -> MetricTable:
        """Logged values by name, in the order of the first value."""
        return self._metrics_of(None)

    def _metrics_of(self, cell: int | None) -> MetricTable:
        """Return the values that were logged in one cell, by name; None: in all cells."""
        rows = self.rows("metric")
        return MetricTable(rows if cell is None else rows[rows["cell"] == cell], self.store.texts.of)

    @property
    def dropped(self) -> dict[int, int]:
        """Number of rows that were dropped because the notebook could not keep up, by rank."""
        return {rank: count for rank, count in sorted(self.store.dropped.items()) if count}

    # ---- what a column's numbers mean

    def text(self, number: int) -> str:
        """Return the text for a number in a column of type `records.TEXT`."""
        return self.store.texts[number]

    def group_of(self, number: int) -> dict[str, Any]:
        """Return the group that a text describes: "name", "title" and "ranks"."""
        found = self._groups.get(number)
        if found is None:
            found = self._groups[number] = group_of(self.text(number))
        return found

    def _shapes_of(self, number: int) -> tuple[tuple[int, ...], ...]:
        """Return the shapes that a text describes."""
        return shapes_of(self.store.texts.parsed(number))

    def clock_error_ns(self, rank: int) -> int:
        """Return the largest error of a rank's times; 0 if unknown, as in files without a notebook."""
        return self.clock.error_ns(rank) or 0

    # ---- values of tensors

    def _preview(self, rank: int, call: int, side: int) -> Preview | None:
        """Return the contents of a call's tensors; None if they were not recorded or were dropped.

        Args:
            call: call count of the rank.
            side: index in `records.SIDES`: 0 the input, 1 the output.
        """
        row = self.store.find_values(rank, call, side)
        return None if row is None else preview_of(row, self.text)

    def tensor(self, rank: int, call: int, side: int) -> list[npt.NDArray[np.generic]]:
        """Return the complete tensors of a call, if `--tensors full` has kept them. The arguments are those of
        `_preview`.
        """
        return self.store.whole(rank, call, side)
