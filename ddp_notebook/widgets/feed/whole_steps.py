"""Steps of one cell as they arrive: when they are complete on all ranks, and how their time was spent.

`observe.steps.cycles` and `observe.steps.steps` measure a finished cell. This module measures the same parts
incrementally and for all ranks at once. One rule is simpler: if several optimizers alternate, a step ends with the
optimizer that was first used last.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ddp_notebook.observe.steps.cycles import Pauses, outermost
from ddp_notebook.observe.steps.steps import answers_of, in_order, parts, samples_of, served_of
from ddp_notebook.observe.tables.matching import RowSource
from ddp_notebook.records.schema import SPANS, Rows
from ddp_notebook.widgets.feed.table_rows import ms
from ddp_notebook.widgets.feed.tables import empty

_OPTIMIZER, _CELL = SPANS.index("optimizer"), SPANS.index("cell")
_KEPT = 8  # steps kept before the last measured one, for late rows
_GONE_S = 2.0  # longest wait for ranks that have not taken a step
_NEVER = np.iinfo(np.int64).max
Numbers = npt.NDArray[np.int64]


class Cutter:
    """Boundaries of the steps of one cell on each rank.

    Args:
        recording: Recording that the rows come from.
        cell: Number of the cell.
    """

    def __init__(self, recording: RowSource, cell: int) -> None:
        self.world_size = world_size = recording.world_size  # current value
        self._cell = cell
        self.skips_first = False  # rows of the first step were left out
        # start of the first step, then the end of each step
        self._edges: list[list[int]] = [[] for _ in range(world_size)]
        self._begins: list[list[int]] = [[] for _ in range(world_size)]  # start of the step that ends at the next edge
        self._pauses = [Pauses() for _ in range(world_size)]
        self._first = [0] * world_size  # number of the step that starts at the first edge
        self._begin_ns = np.full(world_size, _NEVER)  # start of the rank's first span
        # optimizers by rank and thread, in the order of their first step
        self._names: dict[tuple[int, int], list[int]] = {}
        self._waits_since_s: float | None = None  # since when the measurement waits for ranks that lack a step
        self._next = 0  # first step that was not measured yet

    @property
    def has_steps(self) -> bool:
        return any(self._edges)

    def add(self, spans: Rows) -> None:
        """Add new spans."""
        spans = spans[(spans["end_ns"] >= 0) & (spans["kind"] != _CELL) & (spans["rank"] < len(self._edges))]
        np.minimum.at(self._begin_ns, spans["rank"], spans["start_ns"])
        ends = spans[spans["kind"] == _OPTIMIZER]
        if (ends["name"] != ends["name"][:1]).any():  # an optimizer that wraps another one counts once
            ranks = np.unique(ends["rank"]).tolist()
            ends = np.concatenate([outermost(ends[ends["rank"] == rank]) for rank in ranks])
        others = spans[spans["kind"] != _OPTIMIZER]
        for rank in np.unique(spans["rank"]).tolist():
            self._add_to(rank, ends[ends["rank"] == rank], others[others["rank"] == rank])

    def _add_to(self, rank: int, ends: Rows, others: Rows) -> None:
        """Add spans of one rank in the order of time. If times are equal, a step ends before the next span starts."""
        threads = [thread for its, thread in self._names if its == rank] or np.unique(ends["thread"]).tolist()
        others = others[np.isin(others["thread"], threads)] if threads else others
        events = [(end_ns, 0, row) for *row, end_ns in ends[["thread", "name", "step", "end_ns"]].tolist()]
        events += [(row[2], 1, row) for row in others[["kind", "name", "start_ns", "end_ns", "is_training"]].tolist()]
        for time_ns, is_span, row in sorted(events, key=lambda event: event[:2]):
            if is_span:
                self._pauses[rank].add(*row)
            else:
                thread, name, step = row
                self._step(rank, thread, name, step, time_ns)

    def _step(self, rank: int, thread: int, name: int, step: int, end_ns: int) -> None:
        """Record the step of an optimizer."""
        edges = self._edges[rank]
        names = self._names.setdefault((rank, thread), [])
        if name not in names:
            names.append(name)
        if name != names[-1] or (edges and end_ns <= edges[-1]):
            return
        if edges or step < len(names):
            begin_ns = edges[-1] if edges else int(self._begin_ns[rank])
            if not edges:
                edges.append(begin_ns)
            self._begins[rank].append(min(self._pauses[rank].end_step(begin_ns), end_ns))
        else:  # the rows of the first steps were dropped
            self._first[rank] = step // len(names) + 1
        edges.append(end_ns)

    def _is_stepping(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Return (n,) flags of the spans or calls in threads that run optimizer steps."""
        stepping = np.array([rank << 32 | thread for rank, thread in self._names], np.int64)
        return np.isin(rows["rank"].astype(np.int64) << 32 | rows["thread"], stepping)

    def numbers(self, ranks: Numbers, times_ns: Numbers) -> Numbers:
        """Return (n,) the step that contains each time. A time before the first step gets the number before it."""
        if not len(times_ns):
            return np.zeros(0, np.int64)
        ranks, low = ranks.astype(np.int64), int(times_ns.min())
        counts = [len(edges) for edges in self._edges]
        flat = np.array([edge for edges in self._edges for edge in edges], np.int64)
        apart = max(int(times_ns.max()), int(flat.max(initial=low))) - low + 2
        of_rank = np.repeat(np.arange(len(counts)), counts)
        shifted = np.maximum(flat - low, -1) + of_rank * apart + 1
        before = np.concatenate(([0], np.cumsum(counts)))[:-1]
        found = np.searchsorted(shifted, times_ns - low + ranks * apart + 1, "right") - 1 - before[ranks]
        return np.asarray(found + np.array(self._first)[ranks], np.int64)

    def ready(self, now_s: float) -> range:
        """Return the unmeasured steps that all ranks of the cell have taken, or that some have taken long enough
        ago."""
        taken = [
            first + max(len(edges) - 1, 0) if edges else 0
            for first, edges, begin_ns in zip(self._first, self._edges, self._begin_ns.tolist(), strict=True)
            if begin_ns < _NEVER
        ]
        until, furthest = min(taken, default=0), max(taken, default=0)
        if until > self._next or furthest <= self._next:
            self._waits_since_s = None
        elif self._waits_since_s is None:
            self._waits_since_s = now_s
        elif now_s - self._waits_since_s > _GONE_S:
            until = furthest
        return range(max(self._next, int(self.skips_first)), until)

    def measure(
        self, numbers: Numbers, spans: Rows, calls: Rows, waited: Numbers, remote: Rows, start_ns: int
    ) -> tuple[Rows, Rows]:
        """Return rows of `step` and `bucket` for these steps on all ranks that have them.

        They are sorted by step, so that the last rows belong to the last steps of all ranks.

        Args:
            spans, calls: Rows of these steps. Rows of other steps are ignored.
            waited: (n,) Nanoseconds that each call waited for other ranks.
            remote: Remote calls of all cells, one row for each side of a call.
            start_ns: Start of the recording.
        """
        found = [
            (rank, number, begins[number - first], edges[number - first + 1])
            for number in numbers.tolist()
            for rank, (begins, edges, first) in enumerate(zip(self._begins, self._edges, self._first, strict=True))
            if first <= number < first + len(edges) - 1
        ]
        if not found:
            return empty("step"), empty("bucket")
        rank, number, begin_ns, end_ns = np.array(found, np.int64).T
        low, high = np.full(len(self._edges), _NEVER), np.full(len(self._edges), -1)
        np.minimum.at(low, rank, begin_ns)
        np.maximum.at(high, rank, end_ns)
        spans = spans[(spans["end_ns"] >= low[spans["rank"]]) & (spans["start_ns"] <= high[spans["rank"]])]
        spans = spans[(spans["kind"] != _CELL) & self._is_stepping(spans)]
        until_ns = np.maximum(calls["end_ns"], calls["issue_ns"] + calls["blocked_ns"])
        overlaps = (until_ns >= low[calls["rank"]]) & (calls["issue_ns"] <= high[calls["rank"]])
        calls, waited = calls[overlaps], waited[overlaps]
        remote = remote[(remote["end_ns"] >= 0) & (remote["rank"] < len(self._edges))]
        remote = remote[(remote["end_ns"] >= low[remote["rank"]]) & (remote["start_ns"] <= high[remote["rank"]])]

        times = [begin_ns, end_ns, spans["start_ns"], spans["end_ns"], calls["issue_ns"], calls["end_ns"]]
        times += [remote["start_ns"], remote["end_ns"]]
        origin = min(int(one[one >= 0].min(initial=_NEVER)) for one in times)
        apart = max(int(one.max(initial=0)) for one in times) - origin + 1 + int(calls["blocked_ns"].max(initial=0))

        def moved(of_rank: Numbers, times_ns: Numbers) -> Numbers:
            """Shift the times of each rank so that the ranks follow each other, and one sweep measures all of them."""
            return np.where(times_ns < 0, -1, times_ns - origin + of_rank.astype(np.int64) * apart)

        for column in ("start_ns", "end_ns"):
            spans[column] = moved(spans["rank"], spans[column])
            remote[column] = moved(remote["rank"], remote[column])
        for column in ("issue_ns", "start_ns", "end_ns"):
            calls[column] = moved(calls["rank"], calls[column])
        calls, waited = in_order(calls, waited)
        begins, ends = moved(rank, begin_ns), moved(rank, end_ns)
        edges = np.unique(np.concatenate((begins, ends)))
        at = np.searchsorted(edges, begins)
        answers = answers_of(remote[self._is_stepping(remote)], spans)
        taken = parts(edges, spans, calls, waited, self._is_stepping(calls), answers, served_of(remote))
        samples = samples_of(spans, edges)

        steps = empty("step", len(at))
        steps["rank"], steps["cell"], steps["step"] = rank, self._cell, number
        steps["start"], steps["duration"] = ms(begin_ns, start_ns), (end_ns - begin_ns) / 1e6
        for name in steps.dtype.names or ():
            if name in taken:
                steps[name] = taken[name][at] / 1e6
        steps["samples"] = samples[at]

        of_edge = np.full(len(edges), -1, np.int64)
        of_edge[at] = np.arange(len(at))
        of_step = of_edge[np.maximum(np.searchsorted(edges, calls["issue_ns"], "right") - 1, 0)]
        is_bucket = (calls["bucket"] >= 0) & (of_step >= 0)
        calls, of_step = calls[is_bucket], of_step[is_bucket]
        buckets = empty("bucket", len(calls))
        back = origin - calls["rank"].astype(np.int64) * apart
        for name in ("rank", "cell", "bucket"):
            buckets[name] = calls[name]
        buckets["step"], buckets["nbytes"], buckets["model"] = number[of_step], calls["nbytes_in"], calls["module"]
        buckets["start"] = ms(calls["issue_ns"] + back, start_ns)
        buckets["end"] = np.where(calls["end_ns"] < 0, np.nan, ms(calls["end_ns"] + back, start_ns))
        return steps, buckets[np.argsort(buckets["step"], kind="stable")]

    def done(self, before: int) -> npt.NDArray[np.int64]:
        """Drop the steps before this one. Return for each rank the time before which no row is needed."""
        self._next = max(self._next, before)
        needed = np.full(len(self._edges), -1, np.int64)
        for rank, edges in enumerate(self._edges):
            at = self._next - self._first[rank]
            if edges and at > 0:
                needed[rank] = edges[min(at, len(edges) - 1)]
                if at > 2 * _KEPT:
                    del edges[: at - _KEPT], self._begins[rank][: at - _KEPT]
                    self._first[rank] += at - _KEPT
        return needed
