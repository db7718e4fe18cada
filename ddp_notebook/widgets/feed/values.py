"""Which values of tensors travel: those of the newest collectives, as many as there is room for."""

from __future__ import annotations

from collections import deque

import numpy as np

from ddp_notebook.observe.tables.recorded import RecordedTables
from ddp_notebook.observe.tables.store import keys_of
from ddp_notebook.records.schema import CALL, Rows
from ddp_notebook.widgets.feed import table_rows
from ddp_notebook.widgets.feed.tables import empty

VALUE_BYTES_PER_S = 5_000.0  # of the budget in `feed`
_ROW_BYTES = 24.0  # and four for each first value
_LOOKS = 18  # looks at values in which those of a call have come, from all ranks: 2 s


class ValueFeed:
    """The values of one recording's tensors, as they come.

    Args:
        recording: that may grow.
        end: index in its table of values; those before have travelled.
    """

    def __init__(self, recording: RecordedTables, end: int) -> None:
        self._recording = recording
        self._ends: deque[int] = deque([end], maxlen=_LOOKS)
        self._allowance = VALUE_BYTES_PER_S
        self._late: tuple[Rows, int] = np.zeros(0, CALL), 0  # calls whose values had to wait, and since which index

    @property
    def is_waiting(self) -> bool:
        """Whether values wait until there is room."""
        return len(self._late[0]) > 0

    def take(self, calls: Rows, seconds: float) -> Rows:
        """Rows of `value` of the newest of these calls, as many as may travel.

        Args:
            calls: of collectives that have become known on all their ranks.
            seconds: since the last time.
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
            is_last = len(found) == 1  # the very last collective always travels, if not now then later
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
        """Rows of `value` of these calls, in their order.

        Args:
            since: index in the table of values; earlier rows are not looked at.
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
