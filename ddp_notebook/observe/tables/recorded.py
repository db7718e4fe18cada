"""The tables of a recording: rows with times of the notebook's clock, and what their numbers mean."""

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
    """The metrics of some rows, in the order in which their names came first.

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
        by_time = np.argsort(order[begins])  # a stable sort leaves the first row of each name in front
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
    """The clock that a rank had until its process was replaced by one on another host."""

    rank: int
    ends: Mapping[str, int]  # by table: the index of the first row of its next clock
    clock: Clock


class RecordedTables:
    """What the ranks have recorded, as tables in bounded memory: the oldest rows go first.

    `Recording` adds the questions, figures and files of users. What is below it, the monitor among it, takes this.

    Args:
        world_size: how many ranks there are.
        capacity: rows that are kept, by table of `records.TABLES`; 200 MB in all where nothing is said.
        clock: offsets of the ranks' clocks.
    """

    def __init__(
        self, world_size: int, *, capacity: Mapping[str, int] | None = None, clock: Clock | None = None
    ) -> None:
        self.world_size = world_size  # the number of ranks includes those that have left
        self.present = world_size  # ranks that have not left
        self.hosts: tuple[str, ...] = ()  # by rank: where each is, or was last; (): all on one machine, or not known
        self.clock = clock or Clock()
        self.former: list[FormerClock] = []  # of ranks that went to other hosts, in the order in which they did
        self.baseline: Mapping[str, Any] | None = None  # what one rank alone reached, once that was measured
        self.aside: set[int] = set()  # cells whose rows are not shown any more
        self.listeners: list[Callable[[Batch], None]] = []  # called with each batch that came in, in the feeding thread
        self.catch_up: Callable[[], None] | None = None  # brings in what ranks have recorded and not sent yet
        self._asks_nobody = 0  # blocks of `as_it_is` that run
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

    def feed(self, batch: Batch) -> None:
        """Take in what a rank has sent. Only one thread may do so."""
        self.store.feed(batch)
        for listener in self.listeners:
            listener(batch)

    def _feed_dropped(self, batch: Batch) -> None:
        """Take in what is left of a batch whose rows had to be dropped: its texts, and how many rows those were."""
        self.store.learn(batch)

    def _part_from_clock(self, rank: int) -> None:
        """The rank has another clock from now on. The rows that are there keep the one that they have."""
        ends = {table: ring.end for table, ring in self.store.rings.items()}
        self.former.append(FormerClock(rank=rank, ends=ends, clock=self.clock.part(rank)))

    def _set_aside(self, cell: int) -> None:
        """Show no rows of a cell any more: it ran for a comparison only."""
        self.aside.add(cell)

    # ---- rows

    @contextmanager
    def _as_it_is(self) -> Iterator[None]:
        """Ask no rank for rows in the block: those that have come are all."""
        self._asks_nobody += 1
        try:
            yield
        finally:
            self._asks_nobody -= 1

    def rows(self, table: str, since: int = 0) -> Rows:
        """A copy of a table's rows, times on the notebook's clock. Ranks come as their batches came. Of metrics that
        are more than the table holds the earlier ones are thinned.

        Args:
            table: of `records.TABLES`.
            since: index of the first row; rows that are not kept any more are left out.

        Raises:
            UsageError: there is no such table.
        """
        catch_up = self.catch_up  # read once: the end of a session takes it away
        if catch_up is not None and not self._asks_nobody:
            catch_up()
        return self._metrics_until() if table == "metric" and not since else self.follow(table, since)[0]

    def _metrics_until(self, end: int | None = None) -> Rows:
        """Return a copy of the rows of `metric`, the thinned ones in front.

        Args:
            end: the index after the last row; None: all that are there.
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
        """What a reader has not seen yet: `(rows, the index to ask from next, rows that were lost to it)`.

        Args:
            table: of `records.TABLES`.
            index: where the reader is, from 0.
            most: rows; None: all.

        Raises:
            UsageError: there is no such table.
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
        """Put times onto the notebook's clock, in place.

        Args:
            place: the position here of the row with an index; of an earlier one at most 0.
        """
        begins: dict[int, int] = {}  # by rank: where the rows of its next clock begin
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
        """What was logged, by name, in the order in which the names came first."""
        return self.metrics_of(None)

    def metrics_of(self, cell: int | None) -> MetricTable:
        """Return what was logged in one cell, by name; None: in all cells."""
        rows = self.rows("metric")
        return MetricTable(rows if cell is None else rows[rows["cell"] == cell], self.store.texts.of)

    @property
    def dropped(self) -> dict[int, int]:
        """Rows that were dropped since the notebook could not keep up, by rank."""
        return {rank: count for rank, count in sorted(self.store.dropped.items()) if count}

    @property
    def left_out(self) -> int:
        """Calls of all ranks whose values were left out, since a training was fast; `%ddp_record all` keeps them."""
        return self.store.left_out

    # ---- what a column's numbers mean

    def text(self, number: int) -> str:
        """The text that a column of type `records.TEXT` means."""
        return self.store.texts[number]

    def group_of(self, number: int) -> dict[str, Any]:
        """The group that a text means: "name", "title" and "ranks"."""
        found = self._groups.get(number)
        if found is None:
            found = self._groups[number] = group_of(self.text(number))
        return found

    def _shapes_of(self, number: int) -> tuple[tuple[int, ...], ...]:
        """The shapes that a text means."""
        return shapes_of(self.store.texts.parsed(number))

    def clock_error_ns(self, rank: int) -> int:
        """By how much the times of a rank may be off; 0 where nothing is known, as in files without a notebook."""
        return self.clock.error_ns(rank) or 0

    # ---- values of tensors

    def _preview(self, rank: int, call: int, side: int) -> Preview | None:
        """What was in the tensors of a call; None where it was not recorded, or is not kept any more.

        Args:
            call: the rank's count of calls.
            side: index in `records.SIDES`: 0 the input, 1 the output.
        """
        row = self.store.find_values(rank, call, side)
        return None if row is None else preview_of(row, self.text)

    def tensor(self, rank: int, call: int, side: int) -> list[npt.NDArray[np.generic]]:
        """The whole tensors of a call, where `--tensors full` has kept them. Arguments as those of `preview`."""
        return self.store.whole(rank, call, side)
