"""Remote calls on the timeline: one bar on each of the two ranks, sent together."""

from __future__ import annotations

import numpy as np

from ddp_notebook.observe.tables.recorded import RecordedTables
from ddp_notebook.observe.tables.rpc_rows import latest
from ddp_notebook.records.schema import RPC, RPC_KINDS, RPC_SIDES, STATES, Rows
from ddp_notebook.widgets.feed.budget import DrawingBudget
from ddp_notebook.widgets.feed.messages import FeedTexts
from ddp_notebook.widgets.feed.table_rows import ms
from ddp_notebook.widgets.feed.tables import KINDS, empty

_CALLER, _CALLEE = map(RPC_SIDES.index, ("caller", "callee"))
_TORCHS = RPC_KINDS.index("torch")
_REMOTE_CALL, _EXECUTION = map(KINDS.index, ("remote call", "execution"))
_ISSUED, _DONE, _FAILED = map(STATES.index, ("issued", "done", "failed"))
_LATE_S = 0.3  # after this time a caller row is sent without its callee row
_FORGOTTEN_S = 3.0  # after this time a callee row without a caller row is dropped, such as an internal call of torch
_CALL_BYTES = 64.0  # size of both bars, measured by tests/benchmarks/monitor.py
_MOST = 1.5  # size of a burst, as a multiple of one period's share of the rate


class RemoteCalls:
    """Selects the calls to send: with both sides, and within the rate limit.

    Args:
        recording: Recording that the rows come from.
        texts: Texts, which number the kinds of calls.
        only: Only calls of this cell; None for all cells.
    """

    def __init__(self, recording: RecordedTables, texts: FeedTexts, only: int | None) -> None:
        self._recording, self._texts, self._only = recording, texts, only
        self._thin = DrawingBudget(np.inf)
        self._rows, self._came_s = np.zeros(0, RPC), np.zeros(0)
        self._looked_s: float | None = None
        self._chosen = 0  # number of calls considered so far
        self.cell = 0  # cell of the latest call
        self.left_out = 0  # number of left-out calls

    @property
    def every(self) -> int:
        """Return n if one of n calls is sent."""
        return self._thin.every

    @property
    def is_waiting(self) -> bool:
        """Return whether calls wait for their other side."""
        return len(self._rows) > 0

    def bound(self, bytes_per_s: float) -> None:
        """Set the rate limit. There is none before the first call."""
        self._thin.bytes_per_s, self._looked_s = bytes_per_s, None

    def take(self, rows: Rows, now_s: float, start_ns: int) -> Rows:
        """Return the bars to send after these rows have arrived.

        Args:
            rows: Rows of `rpc`.
            now_s: Time of a monotonic clock.
            start_ns: Start of the recording.
        """
        seconds = 0.1 if self._looked_s is None else max(now_s - self._looked_s, 0.02)
        self._looked_s = now_s
        rows = rows[rows["end_ns"] >= 0]  # a running call has another row later
        is_one = rows["kind"] != _TORCHS
        if self._only is not None:
            is_one &= rows["cell"] == self._only
        rows = rows[is_one | (rows["side"] == _CALLEE)]
        self._rows = rows = np.concatenate((self._rows, rows))
        self._came_s = np.concatenate((self._came_s, np.full(len(rows) - len(self._came_s), now_s)))
        if not len(rows):
            return empty("span")
        age_s, is_caller = now_s - self._came_s, rows["side"] == _CALLER
        numbers, counts = np.unique(rows["number"], return_counts=True)
        is_whole = np.isin(rows["number"], numbers[counts > 1])
        going = np.unique(rows["number"][is_caller & (is_whole | (age_s > _LATE_S))])
        goes = np.isin(rows["number"], going)
        stays = ~goes & (age_s <= _FORGOTTEN_S)
        self._rows, self._came_s = rows[stays], self._came_s[stays]
        return bars(self._recording, self._texts, self._thinned(rows[goes], seconds), start_ns)

    def _thinned(self, rows: Rows, seconds: float) -> Rows:
        """Remove the calls that exceed the rate limit."""
        callers = rows[rows["side"] == _CALLER]
        if not len(callers):
            return rows
        self.cell = max(self.cell, int(callers["cell"].max()))
        if self._thin.bytes_per_s == np.inf:
            return rows
        callers = callers[callers["start_ns"].argsort(kind="stable")]
        counted = np.arange(self._chosen, self._chosen + len(callers))
        self._chosen += len(callers)
        self._thin.adapt(counted, _CALL_BYTES * len(callers), seconds)
        kept = callers["number"][self._thin.keep(counted)]
        kept = kept[: max(1, int(_MOST * self._thin.bytes_per_s * seconds / _CALL_BYTES))]
        self.left_out += len(callers) - len(kept)
        return rows[np.isin(rows["number"], kept)]


def bars(recording: RecordedTables, texts: FeedTexts, rows: Rows, start_ns: int) -> Rows:
    """Return the bars of calls that have a caller row, in the order of their start.

    The caller's bar lasts from sending to the answer. The callee's bar is added if the callee's row exists.
    """
    callers = rows[(rows["side"] == _CALLER) & (rows["kind"] != _TORCHS)]
    callers = callers[callers["start_ns"].argsort(kind="stable")]
    callees = rows[rows["side"] == _CALLEE]
    callees = callees[callees["number"].argsort()]
    at = np.minimum(np.searchsorted(callees["number"], callers["number"]), max(len(callees) - 1, 0))
    is_matched = callees["number"][at] == callers["number"] if len(callees) else np.zeros(len(callers), bool)
    callees, of = callees[at[is_matched]], callers[is_matched]
    found, theirs = empty("span", len(callers)), empty("span", len(callees))
    for one, calls in ((found, callers), (theirs, of)):
        for name, column in (("cell", "cell"), ("name", "function"), ("site", "site"), ("call", "number")):
            one[name] = calls[column]
    found["kind"], theirs["kind"] = _REMOTE_CALL, _EXECUTION
    found["rank"], theirs["rank"] = callers["rank"], callees["rank"]
    found["peer"], theirs["peer"] = callers["dst"], of["rank"]
    found["thread"], theirs["thread"] = callers["thread"], callees["thread"]
    ended = np.where(callees["end_ns"] < 0, -1, np.maximum(callees["end_ns"], callees["done_ns"]))
    found["start"], found["end"] = ms(callers["start_ns"], start_ns), ms(callers["end_ns"], start_ns)
    theirs["start"], theirs["end"] = ms(callees["start_ns"], start_ns), ms(ended, start_ns)
    found["nbytes"] = np.where(callers["nbytes"] >= 0, callers["nbytes"], np.nan)
    theirs["nbytes"] = np.where(of["nbytes_back"] >= 0, of["nbytes_back"], np.nan)
    for one, calls in ((found, callers), (theirs, callees)):
        one["state"] = np.where(calls["end_ns"] < 0, _ISSUED, np.where(calls["error"] > 0, _FAILED, _DONE))
    for kind in np.unique(callers["kind"]).tolist():
        found["op"][callers["kind"] == kind] = texts.own(RPC_KINDS[kind])
    theirs["op"] = found["op"][is_matched]
    order = np.concatenate((np.arange(len(found)), np.flatnonzero(is_matched))).argsort(kind="stable")
    return np.concatenate((found, theirs))[order]


def within(rows: Rows, begin_ns: int, end_ns: int, only: int | None) -> Rows:
    """Return both sides of the calls that overlap an interval, of one cell or of all."""
    rows = latest(rows)
    is_caller = rows["side"] == _CALLER
    if only is not None:
        is_caller &= rows["cell"] == only
    is_seen = is_caller & (rows["start_ns"] < end_ns) & ((rows["end_ns"] > begin_ns) | (rows["end_ns"] < 0))
    return rows[np.isin(rows["number"], rows["number"][is_seen])]
