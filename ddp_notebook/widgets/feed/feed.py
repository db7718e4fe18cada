"""Follows a recording for the monitor: messages with new rows, and snapshots for views that open late."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ddp_notebook.observe.tables.matching import label_of
from ddp_notebook.observe.tables.recorded import RecordedTables
from ddp_notebook.observe.tables.ring_buffer import RingBuffer
from ddp_notebook.records.schema import CALL, RESOURCE, RPC, SPAN, TIMES, Rows
from ddp_notebook.widgets.feed import courses, table_rows
from ddp_notebook.widgets.feed.messages import FeedMessage, FeedTexts
from ddp_notebook.widgets.feed.rpc_bars import RemoteCalls
from ddp_notebook.widgets.feed.tables import FEED_TABLES, FIRST, empty, pack
from ddp_notebook.widgets.feed.timeline import Timeline
from ddp_notebook.widgets.feed.value_selection import ValueFeed

# Rate limits. With the 5 kB/s of `values`, the headers and the states of ranks, the total is below 60 kB/s.
TIMELINE_BYTES_PER_S, METRIC_BYTES_PER_S, REMOTE_BYTES_PER_S = 27_000.0, 12_000.0, 8_000.0
_BURST_BYTES = 8_000.0  # part of the timeline that may be sent at once
_TIMELINE_BYTES = {"step": 42.0, "bucket": 14.0, "span": 28.0}  # per row, measured by tests/benchmarks/monitor.py
_TIMELINE_PERIOD_S = 0.18  # every second message: the cost of reading does not depend on the number of rows
_HISTORY = 20_000  # rows of the timeline to read from a recording that already exists
_KEPT = {"step": 1 << 13, "bucket": 1 << 14, "span": 1 << 14, "value": 1 << 10}  # rows kept for snapshots
_SNAPSHOT = {"metric": 1600, "step": 240, "bucket": 300, "span": 220, "value": 32}  # rows per snapshot
_SNAPSHOT_VALUES = 1200  # first values of tensors in a snapshot
_VALUES = ("cell", "kind", "group", "number")
# columns that identify a whole step or collective
_COUNTS = {"step": ("cell", "step"), "bucket": ("cell", "step"), "value": _VALUES}
_EDGE = 1 << 12  # rows at the start and the end of a table that are searched for its first and last time
_MOST_WAITING_S = 4.0  # longest time that a row waits
_MOST_PROMPTS = 256  # most prompts in a snapshot
_NEW_PROMPTS = 4  # most prompts in a message after a snapshot
_CELLS = 4  # cells whose rows may still arrive


class Feed:
    """Creates the messages about one recording. Not thread-safe.

    Args:
        recording: Recording, which may grow.
        only: Send only this cell; None for all cells.
        is_live: New rows will arrive. If false, only the limits of a snapshot apply.
        start_ns: Origin of the times in messages; None for the time of the first row.

    Example:
        >>> feed = Feed(RecordedTables(world_size=2), is_live=False)
        >>> feed.snapshot(0, {}).header["world_size"]
        2
    """

    def __init__(
        self, recording: RecordedTables, only: int | None = None, *, is_live: bool = True, start_ns: int | None = None
    ) -> None:
        self.recording = recording
        self.only = only
        self.is_live = is_live
        self.run = secrets.token_hex(4)
        self.seq = 0
        self.start_ns, self.end_ns = bounds_ns(recording)
        if start_ns is not None:
            self.start_ns = start_ns
        self.last = np.zeros(recording.world_size, CALL)  # last collective of each rank
        self.resources = np.zeros(recording.world_size, RESOURCE)  # last memory and load of each rank
        self._ends = {name: ring.end for name, ring in recording.store.rings.items()}
        self.texts = FeedTexts(recording)
        self.values = ValueFeed(recording, self._ends["value"])
        self._timelines: dict[int, Timeline] = {}
        self._remote = RemoteCalls(recording, self.texts, only)
        self._metrics = courses.Flow(METRIC_BYTES_PER_S if is_live else np.inf)
        self._names = courses.DrawnNames()
        self._metrics_end = self._ends["metric"]  # end of the metric rows that the views have received, thinned or not
        self._waiting = {name: empty(name) for name in _TIMELINE_BYTES}  # rows of the timeline above the rate limit
        self._allowance = _BURST_BYTES
        self._looked_s: float | None = None
        self._timeline_s = 0.0
        self._rows_left_out, self._coarsest = 0, 1  # rows and thinning of cells whose timeline was dropped
        self._is_history_whole = True  # all rows of the existing recording were read
        self._kept = {name: RingBuffer(FEED_TABLES[name], count) for name, count in _KEPT.items()}
        self._ranks: Rows = empty("rank")
        self._layouts: list[dict[str, Any]] = []
        self._said: dict[str, Any] = {}
        self._read_history()

    @property
    def cell(self) -> int:
        """Return the cell of the latest rows; 0 if the recording is empty."""
        if self.only is not None:
            return self.only
        metrics, _, _ = self.recording.follow("metric", self._ends["metric"] - 1, 1)
        return max(*self._timelines, int(metrics["cell"].max(initial=0)), self._remote.cell, 0)

    # ---- what is new

    def has_news(self) -> bool:
        """Return whether new rows exist or rows wait for other ranks. Ignores memory and load, which `present`
        sends."""
        rings = self.recording.store.rings
        return (
            any(rings[name].end > self._ends[name] for name in ("metric", "call", "span", "rpc", "layout"))
            or any(timeline.is_waiting for timeline in self._timelines.values())
            or self._remote.is_waiting
            or any(map(len, self._waiting.values()))
            or self._metrics.is_waiting
            or self.values.is_waiting
        )

    def delta(self, now_ns: int, head: Mapping[str, Any], ranks: Rows | None = None) -> FeedMessage | None:
        """Return a message with the changes since the last one; None if there are none.

        Args:
            now_ns: Time of the notebook's clock.
            head: Session part of the header: `state`, `cell`, `title`, ...
            ranks: Rows of `rank`, if they are new.
        """
        tables = self._look(now_ns / 1e9)
        if ranks is not None:
            self._ranks = tables["rank"] = ranks
        said = {**head, "hosts": list(self.recording.hosts), "notes": self.notes(), "layouts": self._layouts}
        said["prompts"] = list(self.recording.prompts.items())[-_NEW_PROMPTS:]
        new = {name: value for name, value in said.items() if self._said.get(name) != value}
        if not new and not any(map(len, tables.values())):
            return None
        self._said = said
        self.seq += 1
        return self._message("delta", now_ns, new, tables, self.texts.untold(tables, new.get("layouts", ())))

    def snapshot(self, now_ns: int, head: Mapping[str, Any]) -> FeedMessage:
        """Return the first message of a view: the latest rows, and the thinned metrics of the newest cells."""
        tables = {name: self._latest(name) for name in _KEPT}
        # with many ranks not all first values fit; `count` has the number of sent values
        values = tables["value"]
        values["count"] = np.minimum(values["count"], min(FIRST, 1 + _SNAPSHOT_VALUES // max(1, len(values))))
        tables |= self.metrics(_SNAPSHOT["metric"])
        tables["rank"] = self._ranks
        said = {**head, "hosts": list(self.recording.hosts), "notes": self.notes(), "layouts": self._layouts}
        said["prompts"] = list(self.recording.prompts.items())[-_MOST_PROMPTS:]
        said["steps_left_out"] = len(self.kept("step")) - len(tables["step"])
        self.texts.forget_told()
        return self._message("snapshot", now_ns, said, tables, self.texts.of(tables, self._layouts))

    def answer(self, request: Any, now_ns: int, tables: Mapping[str, Rows], **more: Any) -> FeedMessage:
        """Return a message with rows that a view has requested."""
        data = more.pop("data", b"")
        made = self._message("answer", now_ns, {"request": request, **more}, tables, self.texts.of(tables))
        if data:
            made.header["data"] = {"dtype": "f4", "offset": len(made.data), "count": len(data) // 4}
        return FeedMessage(made.header, made.data + data)

    def kept(self, table: str) -> Rows:
        """Return the kept rows of a table of the timeline, only of the cell `only` if it is set."""
        rows = self._kept[table].all()
        return rows if self.only is None else rows[rows["cell"] == self.only]

    def steps(self) -> tuple[dict[str, Rows], int]:
        """Return rows of steps and buckets, and the thinning factor of the steps.

        A live feed thins steps. If the recording still holds all of them, they are computed again without thinning.
        """
        is_thinned = self._steps_left_out > 0
        source = Feed(self.recording, self.only, start_ns=self.start_ns) if is_thinned else self
        every = max([self._coarsest, *(one.coarsest for one in self._timelines.values())])
        return {name: source.kept(name) for name in ("step", "bucket")}, 1 if source._is_history_whole else every

    @property
    def world_size(self) -> int:
        """Return the number of ranks in the messages.

        After a resize, the recording has the new number at once. This feed keeps the old one until another feed
        replaces it.
        """
        return min(len(self.last), self.recording.world_size)

    @property
    def ranks(self) -> Rows:
        """Return the latest rows of `rank`; empty before the first ones."""
        return self._ranks

    @property
    def _steps_left_out(self) -> int:
        """Return the number of left-out rows of the timeline."""
        return self._rows_left_out + sum(one.left_out for one in self._timelines.values())

    def notes(self) -> dict[str, Any]:
        """Return the notes about left-out data."""
        latest = next(reversed(self._timelines.values()), None)
        cell, names = self._names.left_out
        return {
            "metrics": f"the first {courses.MOST_NAMES} metrics of {label_of(self.recording, cell)} are drawn; "
            f"{names:,} more are not"
            if names
            else "",
            "units_shown_of": latest.every if latest is not None else 1,
            "remote_shown_of": self._remote.every,
            "rows_left_out": self._steps_left_out + self._remote.left_out,
            "dropped_rows": sum(self.recording.dropped.values()),
            "values_left_out": self.recording.store.left_out,
        }

    def metrics(self, most: int, name: int | None = None, cells: Sequence[int] | None = None) -> dict[str, Rows]:
        """Return about `most` rows of `metric`, and rows of `course`.

        The rows are as old as the last message of `delta`, so that a view can replace its own rows by them.

        Args:
            most: Limit for the rows of `metric`.
            name: Only this metric; None for all.
            cells: Only these cells, in equal shares; None for all cells, where the newest get the most rows.
        """
        rows = self.recording._metrics_until(self._metrics_end)
        rows = courses.of_cells(rows[rows["rank"] < self.world_size], name, cells)
        rows = self._names.choose(rows if self.only is None else rows[rows["cell"] == self.only])
        kept = courses.newest_first(rows, most) if cells is None else courses.evenly(rows, most)
        return {
            "metric": table_rows.metrics(kept, self.start_ns),
            "course": courses.courses(rows),
        }

    def _look(self, now_s: float) -> dict[str, Rows]:
        seconds = 0.1 if self._looked_s is None else max(now_s - self._looked_s, 0.02)
        self._looked_s = now_s
        self._metrics.add(self._names.choose(self._follow("metric")))
        metrics, sizes = self._metrics.take(seconds)
        if not self._metrics.is_waiting:
            self._metrics_end = self._ends["metric"]
        if now_s < self._timeline_s + _TIMELINE_PERIOD_S:
            tables, whole = {name: empty(name) for name in _TIMELINE_BYTES}, np.zeros(0, CALL)
            remote = empty("span")
        else:
            self._timeline_s = now_s
            spans = self._follow("span")  # before the calls: calls arrive before the spans that contain them
            calls = self._follow("call")
            if self.recording.store.rings["layout"].end > self._ends["layout"]:
                self._read_layouts()
            self._read_resources()
            tables, whole = self._timelines_take(spans, calls, now_s)
            remote = self._remote.take(self._follow("rpc"), now_s, self.start_ns)
        if self.is_live:
            tables = self._paced(tables, seconds)
        tables["span"] = np.concatenate((tables["span"], remote))
        tables["metric"], tables["course"] = table_rows.metrics(metrics, self.start_ns), sizes
        tables["value"] = self.values.take(whole, seconds)
        for name in _KEPT:
            if len(tables[name]):
                self._kept[name].append(tables[name])
        return tables

    def _follow(self, table: str) -> Rows:
        rows, self._ends[table], _ = self.recording.follow(table, self._ends[table])
        rows = rows[rows["rank"] < self.world_size]
        # For a remote call, the row of the caller names the cell.
        return rows if self.only is None or table == "rpc" else rows[rows["cell"] == self.only]

    def _timelines_take(self, spans: Rows, calls: Rows, now_s: float) -> tuple[dict[str, Rows], Rows]:
        if len(calls):
            self.last[calls["rank"]] = calls  # keeps the last call of each rank
        cells = {*np.unique(spans["cell"]).tolist(), *np.unique(calls["cell"]).tolist()}
        for cell in sorted(cells - set(self._timelines)):
            self._timelines[cell] = self._timeline(cell, TIMELINE_BYTES_PER_S if self.is_live else None)
        while len(self._timelines) > _CELLS:
            old = self._timelines.pop(next(iter(self._timelines)))
            self._rows_left_out += old.left_out
            self._coarsest = max(self._coarsest, old.coarsest)
        found, whole = [], [np.zeros(0, CALL)]
        for cell, timeline in self._timelines.items():
            if cell in cells or timeline.is_waiting:
                is_all = cells == {cell}
                own_spans = spans if is_all else spans[spans["cell"] == cell]
                own_calls = calls if is_all else calls[calls["cell"] == cell]
                tables, calls_whole = timeline.take(own_spans, own_calls, now_s)
                found.append(tables)
                whole.append(calls_whole)
        names = ("span", "step", "bucket")
        if not found:
            return {name: empty(name) for name in names}, whole[0]
        return {name: np.concatenate([one[name] for one in found]) for name in names}, np.concatenate(whole)

    def _paced(self, tables: dict[str, Rows], seconds: float) -> dict[str, Rows]:
        """Return the rows of the timeline that may be sent now, steps first. The rest waits: a step of many ranks is
        large."""
        self._allowance = min(self._allowance + TIMELINE_BYTES_PER_S * seconds, _BURST_BYTES)
        going = {}
        for name, nbytes in _TIMELINE_BYTES.items():
            rows = np.concatenate((self._waiting[name], tables[name])) if len(self._waiting[name]) else tables[name]
            count = min(len(rows), max(0, int(self._allowance / nbytes)))
            self._allowance -= count * nbytes
            most = int(_MOST_WAITING_S * TIMELINE_BYTES_PER_S / nbytes)
            self._rows_left_out += max(0, len(rows) - count - most)
            going[name], self._waiting[name] = rows[:count], rows[count:][-most:]
        return going

    def _timeline(self, cell: int, bytes_per_s: float | None) -> Timeline:
        before = next(reversed(self._timelines.values()), None)
        return Timeline(self.recording, cell, self.start_ns, bytes_per_s, before.every if before is not None else 1)

    # ---- rows that exist at the start

    def _read_history(self) -> None:
        """Read the last rows of a recording that existed before this feed."""
        now_s = 0.0
        found = {}
        for table, begun in (("span", "start_ns"), ("call", "issue_ns"), ("rpc", "start_ns")):
            # Live rows are nearly sorted by time. A file may store the rows rank by rank.
            since = max(0, self._ends[table] - _HISTORY) if self.is_live else 0
            self._ends[table] = since
            rows = self._follow(table)
            self._is_history_whole &= not since and len(rows) <= _HISTORY
            if len(rows) > _HISTORY:
                rows = rows[rows[begun] >= np.partition(rows[begun], -_HISTORY)[-_HISTORY]]
            found[table] = rows
        self._read_layouts()
        self._ends["resource"] = 0
        self._read_resources()
        spans, calls = found["span"], found["call"]
        if len(calls):
            self.last[calls["rank"]] = calls
        shown = [self._remote.take(found["rpc"], now_s, self.start_ns)]
        shown.append(self._remote.take(np.zeros(0, RPC), now_s + 10.0, self.start_ns))
        if self.is_live:
            self._remote.bound(REMOTE_BYTES_PER_S)
        for cell in np.union1d(spans["cell"], calls["cell"]).tolist():
            history = self._timelines[cell] = self._timeline(cell, None)
            tables, whole = history.take(spans[spans["cell"] == cell], calls[calls["cell"] == cell], now_s)
            late, more = history.take(np.zeros(0, SPAN), np.zeros(0, CALL), now_s + 10.0)  # no row waits here
            tables = {name: np.concatenate((rows, late[name])) for name, rows in tables.items()}
            shown.append(tables.pop("span"))
            tables["value"] = self.values.of(_by_collective(np.concatenate((whole, more)))[-_KEPT["value"] :])
            for name, rows in tables.items():
                self._kept[name].append(rows)
            if self.is_live:
                history.bound(TIMELINE_BYTES_PER_S)
        spans = np.concatenate(shown)
        self._kept["span"].append(spans[np.argsort(spans["end"], kind="stable")])
        while len(self._timelines) > _CELLS:
            self._timelines.pop(next(iter(self._timelines)))

    def _latest(self, table: str) -> Rows:
        """Return the latest rows for a snapshot, with whole steps and whole collectives only."""
        kept = self._kept[table].all()
        if self.only is not None and "cell" in (FEED_TABLES[table].names or ()):
            kept = kept[kept["cell"] == self.only]
        most = _SNAPSHOT[table] * (1 if self.world_size > 1 else 2)
        if table in _COUNTS and len(kept):
            most = max(most, int(_is_same(kept, kept[-1], table).sum()))  # always at least one
        if len(kept) <= most:
            return kept
        rows = kept[-most:]
        return rows[~_is_same(rows, kept[-most - 1], table)] if table in _COUNTS else rows

    def _read_resources(self) -> None:
        rows, self._ends["resource"], _ = self.recording.follow("resource", self._ends["resource"])
        rows = rows[rows["rank"] < self.world_size]
        if len(rows):
            self.resources[rows["rank"]] = rows

    def _read_layouts(self) -> None:
        rows = self.recording.rows("layout")
        self._ends["layout"] = self.recording.store.rings["layout"].end
        found: dict[tuple[int, int], dict[str, Any]] = {}
        for rank, time_ns, model, buckets in rows[["rank", "time_ns", "model", "buckets"]].tolist():
            known = self.recording.store.texts.parsed(buckets)
            if known:
                time_ms = (time_ns - self.start_ns) / 1e6
                one = found.setdefault(
                    (model, buckets), {"model": model, "ranks": [], "time": time_ms, "buckets": known}
                )
                if rank not in one["ranks"]:
                    one["ranks"].append(rank)
        self._layouts = list(found.values())

    # ---- messages

    def _message(
        self, kind: str, now_ns: int, head: Mapping[str, Any], tables: Mapping[str, Rows], texts: list[list[Any]]
    ) -> FeedMessage:
        packed, data = pack(tables)
        header = {
            "kind": kind,
            "seq": self.seq,
            "run": self.run,
            "now_ms": round((now_ns - self.start_ns) / 1e6, 3),
            "world_size": self.world_size,
            **head,
            "texts": texts,
            "tables": packed,
        }
        return FeedMessage(header, data)


def _is_same(rows: Rows, one: Any, table: str) -> npt.NDArray[np.bool_]:
    """Return (n,) flags of the rows that belong to the same step or collective as `one`."""
    return np.logical_and.reduce([rows[name] == one[name] for name in _COUNTS[table]])


def _by_collective(calls: Rows) -> Rows:
    """Sort calls by the time when their collective began on the last rank, and not rank by rank."""
    _, of = np.unique(calls[["cell", "group", "op", "number"]], return_inverse=True)
    begun_ns = np.zeros(len(calls), np.int64)
    np.maximum.at(begun_ns, of, calls["issue_ns"])
    return calls[np.lexsort((calls["rank"], of, begun_ns[of]))]


def bounds_ns(recording: RecordedTables) -> tuple[int, int]:
    """Return the first and the last time of a recording, from its first and last rows; the current time if empty."""
    found = []
    for table, columns in TIMES.items():
        end = recording.store.rings[table].end
        for since in (0, max(0, end - _EDGE)) if columns else ():
            rows, _, _ = recording.follow(table, since, _EDGE)
            for column in columns:
                times = rows[column][rows[column] >= 0]
                if len(times):
                    found += [int(times.min()), int(times.max())]
    now_ns = time.monotonic_ns()
    return min(found, default=now_ns), max(found, default=now_ns)
