"""Selects the spans and calls of one cell to send: immediately, or after the rows of the other ranks have arrived."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ddp_notebook.observe.tables.matching import match_collectives, match_messages
from ddp_notebook.observe.tables.recorded import RecordedTables
from ddp_notebook.observe.tables.rpc_rows import latest
from ddp_notebook.records.schema import CALL, SPAN, SPANS, Rows
from ddp_notebook.widgets.feed import table_rows
from ddp_notebook.widgets.feed.budget import DrawingBudget
from ddp_notebook.widgets.feed.tables import empty
from ddp_notebook.widgets.feed.whole_steps import Cutter

_LATE_S = 0.3  # after this time a call is sent without the rows of the other ranks
_LATE_IN_LOOP_S = 1.5  # the same limit in loops, where ranks send once a second, see `rank.record.flusher`
_ROW_BYTES = 32.0  # size of a span and its share of steps and buckets, measured by tests/benchmarks/monitor.py
_MOST_KEPT = 1 << 13  # rows of a cell without steps that are kept for the first step
_CELL = SPANS.index("cell")


class Timeline:
    """Selects the rows of one cell to send.

    Args:
        recording: Recording that the rows come from.
        cell: Number of the cell.
        start_ns: Start of the recording.
        bytes_per_s: Rate limit; None for no limit.
        every: Initial thinning factor of the steps.
    """

    def __init__(
        self, recording: RecordedTables, cell: int, start_ns: int, bytes_per_s: float | None, every: int = 1
    ) -> None:
        self._recording = recording
        self._start_ns = start_ns
        self._is_bounded = bytes_per_s is not None
        self._cutter = Cutter(recording, cell)
        self._thin = DrawingBudget(bytes_per_s or np.inf, every)  # by step
        self._thin_loose = DrawingBudget(bytes_per_s or np.inf, every)  # for calls without steps, by call number
        self._spans, self._calls = np.zeros(0, SPAN), np.zeros(0, CALL)
        self._span_sent, self._call_sent = np.zeros(0, bool), np.zeros(0, bool)
        self._came_s = np.zeros(0)
        self._waited = np.zeros(0, np.int64)  # nanoseconds that each call waited for the last rank; -1: not known
        self._looked_s: float | None = None
        self.left_out = 0  # number of rows

    @property
    def every(self) -> int:
        return (self._thin if self._cutter.has_steps else self._thin_loose).every

    @property
    def coarsest(self) -> int:
        """Return the largest value of `every` so far."""
        return max(self._thin.coarsest, self._thin_loose.coarsest)

    @property
    def is_waiting(self) -> bool:
        """Return whether calls wait for the rows of other ranks."""
        return not self._call_sent.all()

    def bound(self, bytes_per_s: float) -> None:
        """Set the rate limit."""
        self._is_bounded = True
        self._thin.bytes_per_s = self._thin_loose.bytes_per_s = bytes_per_s

    def take(self, spans: Rows, calls: Rows, now_s: float) -> tuple[dict[str, Rows], Rows]:
        """Return the tables to send after these rows have arrived, and the collectives that are complete on all their
        ranks."""
        self._cutter.add(spans)
        spans, calls = self._thinned(spans, calls, now_s)
        self._spans = np.concatenate((self._spans, spans))
        self._calls = np.concatenate((self._calls, calls))
        self._span_sent = np.concatenate((self._span_sent, np.zeros(len(spans), bool)))
        self._call_sent = np.concatenate((self._call_sent, np.zeros(len(calls), bool)))
        self._came_s = np.concatenate((self._came_s, np.full(len(calls), now_s)))
        self._waited = np.concatenate((self._waited, np.full(len(calls), -1)))

        found = [table_rows.spans(self._spans[~self._span_sent], self._start_ns)]
        self._span_sent[:] = True
        whole = np.zeros(0, CALL)
        if not self._call_sent.all():
            whole, own = self._matched(now_s)
            found.append(own)
        tables = {"span": np.concatenate(found), "step": empty("step"), "bucket": empty("bucket")}
        ready = self._cutter.ready(now_s)
        if len(ready):
            numbers = np.arange(ready.start, ready.stop)
            chosen = numbers[self._thin.keep(numbers)]
            if len(chosen):
                tables["step"], tables["bucket"] = self._cutter.measure(
                    chosen, self._spans, self._calls, np.maximum(self._waited, 0), self._remote(), self._start_ns
                )
            self._forget(self._cutter.done(ready.stop))
        elif len(self._spans) + len(self._calls) > _MOST_KEPT and not self._cutter.has_steps:
            self._cutter.skips_first = True
            self._forget(np.full(self._cutter.world_size, np.iinfo(np.int64).max))
        return tables, whole

    def _remote(self) -> Rows:
        return latest(self._recording.rows("rpc"))

    def _thinned(self, spans: Rows, calls: Rows, now_s: float) -> tuple[Rows, Rows]:
        """Remove the steps that exceed the rate limit."""
        has_steps = self._cutter.has_steps
        thin = self._thin if has_steps else self._thin_loose
        if has_steps:
            of_spans = self._cutter.numbers(spans["rank"], spans["start_ns"])
            of_calls = self._cutter.numbers(calls["rank"], calls["issue_ns"])
        else:
            of_spans, of_calls = spans["span"].astype(np.int64), calls["number"].astype(np.int64)
        if self._is_bounded and len(spans) + len(calls):
            seconds = 0.1 if self._looked_s is None else max(now_s - self._looked_s, 0.02)
            self._looked_s = now_s
            thin.adapt(np.concatenate((of_spans, of_calls)), _ROW_BYTES * (len(spans) + len(calls)), seconds)
        keep_spans, keep_calls = thin.keep(of_spans) | (spans["kind"] == _CELL), thin.keep(of_calls)
        left_out = int(len(spans) + len(calls) - keep_spans.sum() - keep_calls.sum())
        if left_out:
            self.left_out += left_out
            if not has_steps:
                self._cutter.skips_first = True
        return spans[keep_spans], calls[keep_calls]

    def _matched(self, now_s: float) -> tuple[Rows, Rows]:
        """Return the collectives that are complete on all their ranks, and the rows of these and of calls that are
        late."""
        chosen = np.flatnonzero(~self._call_sent)
        calls = self._calls[chosen]
        waited = np.full(len(calls), -1, np.int64)
        is_whole = np.zeros(len(calls), bool)
        matched = match_collectives(self._recording, calls)
        waited[matched.index] = matched.waited_ns
        counts = np.bincount(matched.of, minlength=len(matched))[matched.of]
        is_whole[matched.index] = counts >= self._group_sizes(calls["group"][matched.index])
        whole = calls[is_whole]
        matched = match_messages(self._recording, calls)
        waited[matched.index] = matched.waited_ns
        is_whole[matched.index] = True
        late_s = _LATE_IN_LOOP_S if self._cutter.has_steps else _LATE_S
        goes = is_whole | (now_s - self._came_s[chosen] > late_s)
        self._call_sent[chosen[goes]] = True
        self._waited[chosen[goes]] = waited[goes]
        return whole, table_rows.calls(self._recording, calls[goes], waited[goes], self._start_ns)

    def _group_sizes(self, groups: npt.NDArray[np.uint32]) -> npt.NDArray[np.int64]:
        unique, back = np.unique(groups, return_inverse=True)
        sizes = [len(self._recording.group_of(number)["ranks"]) or 2 for number in unique.tolist()]
        return np.array(sizes, np.int64)[back]

    def _forget(self, before_ns: npt.NDArray[np.int64]) -> None:
        """Drop sent rows that ended before the given time of their rank."""
        keep = ~self._span_sent | (self._spans["end_ns"] >= before_ns[self._spans["rank"]])
        self._spans, self._span_sent = self._spans[keep], self._span_sent[keep]
        until_ns = np.maximum(self._calls["end_ns"], self._calls["issue_ns"])
        keep = ~self._call_sent | (until_ns >= before_ns[self._calls["rank"]])
        self._calls, self._call_sent = self._calls[keep], self._call_sent[keep]
        self._came_s, self._waited = self._came_s[keep], self._waited[keep]
