"""Selects the tensor values to send: those of the newest collectives, within the rate limit."""

from __future__ import annotations

from collections import deque

import numpy as np

from ddp_notebook.observe.tables.recorded import RecordedTables
from ddp_notebook.observe.tables.store import keys_of
from ddp_notebook.records.schema import CALL, Rows
from ddp_notebook.widgets.feed import table_rows
from ddp_notebook.widgets.feed.tables import empty

VALUE_BYTES_PER_S = 5_000.0  # part of the budget of `feed`
_ROW_BYTES = 24.0  # plus four for each first value
_LOOKS = 18  # looks at new values until the values of a call have arrived from all ranks: 2 s


class ValueFeed:
    """Values of the tensors of one recording.

    Args:
        recording: Recording, which may grow.
        end: Index in its table of values. Earlier rows were already sent.
    """

    def __init__(self, recording: RecordedTables, end: int) -> None:
        self._recording = recording
        self._ends: deque[int] = deque([end], maxlen=_LOOKS)
        self._allowance = VALUE_BYTES_PER_S
        # calls whose values had to wait, and the index of their first value
        self._late: tuple[Rows, int] = np.zeros(0, CALL), 0

    @property
    def is_waiting(self) -> bool:
        """Return whether values wait for the rate limit."""
        return len(self._late[0]) > 0

    def take(self, calls: Rows, seconds: float) -> Rows:
        """Return rows of `value` of the newest of these calls, within the rate limit.

        Args:
            calls: Calls of collectives that are now complete on all their ranks.
            seconds: Time since the last call.
        """
        store = self._recording.store
        since = self._ends[0]
        self._ends.append(store.rings["value"].end)
        self._allowance = min(self._allowance + VALUE_BYTES_PER_S * seconds, VALUE_BYTES_PER_S)
        found = [empty("value")]
        if not len(calls):
            calls, since = self._late
        while len(calls):
            newest = calls[np.argmax(calls["issue_ns"])]
            mine = (calls["group"] == newest["group"]) & (calls["number"] == newest["number"])
            mine &= (calls["op"] == newest["op"]) & (calls["cell"] == newest["cell"])
            is_last = len(found) == 1  # the newest collective is always sent, now or later
            if is_last:
                self._late = (calls[mine], since) if self._allowance <= 0 else (calls[:0], 0)
            if self._allowance <= 0:
                break
            rows = self.of(calls[mine], since)
            calls = calls[~mine]
            self._allowance -= len(rows) * _ROW_BYTES + 4 * float(rows["count"].max(initial=0)) * len(rows)
            found.append(rows)
        return np.concatenate(found[::-1])

    def of(self, calls: Rows, since: int = 0) -> Rows:
        """Return rows of `value` of these calls, in their order.

        Args:
            since: Index in the table of values. Earlier rows are ignored.
        """
        store = self._recording.store
        keys, end, _ = store.value_keys.since(since)
        wanted = np.concatenate([keys_of(calls["rank"], calls["call"], np.uint64(side)) for side in (0, 1)])
        places = np.flatnonzero(np.isin(keys, wanted)) + (end - len(keys))
        rows = [row for at in places.tolist() if (row := store.rings["value"].row(at)) is not None]
        if not rows:
            return empty("value")
        found = np.array(rows)
        # A rank may have several of these calls.
        names = keys_of(calls["rank"], calls["call"], np.uint64(0))
        order = np.argsort(names)
        of = order[np.searchsorted(names[order], keys_of(found["rank"], found["call"], np.uint64(0)))]
        by_call = np.argsort(of, kind="stable")
        return table_rows.values(self._recording, found[by_call], calls[of[by_call]])
