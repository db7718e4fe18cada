"""Match calls of different ranks: a collective on all its ranks, and the two ends of each message.

A collective is identified by its cell, its group and its sequence number in the group. A message is identified by its
two ends, its tag and its sequence number. A rank arrives when it issues the call, or when its device reaches the call.
It waits from then until the last rank has arrived, but not longer than its own call lasts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ddp_notebook.observe.tables.distinct import distinct
from ddp_notebook.observe.tables.ring_buffer import select
from ddp_notebook.records.operation import POINT_TO_POINT
from ddp_notebook.records.schema import SPANS, Rows

Times = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.int64]
_MOST = 1 << 63  # larger numbers do not fit


class RowSource(Protocol):
    """Source of rows: a recording, or part of one. Times are on the notebook's clock."""

    @property
    def world_size(self) -> int: ...

    @property
    def hosts(self) -> Sequence[str]:
        """Machine of each rank; (): all ranks are on the same machine."""

    @property
    def baseline(self) -> Mapping[str, Any] | None:
        """Result of one rank alone: `samples_per_s` and `step_ns`."""

    @property
    def prompts(self) -> Mapping[int, str]:
        """Prompts by cell. They are known before the row of the cell, which arrives at its end."""

    def rows(self, table: str) -> Rows: ...

    def text(self, number: int) -> str: ...

    def group_of(self, number: int) -> Mapping[str, Any]:
        """Return `name`, `title` and `ranks` of a group."""

    def clock_error_ns(self, rank: int) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Matched:
    """Matching calls of several ranks: n calls in m collectives, in the order of the last arrivals.

    The calls of collective i are `first[i]` to `first[i + 1]`, ordered by rank.
    """

    index: Numbers  # (n,) row in the table of calls
    of: Numbers  # (n,) number of the collective
    arrived_ns: Times  # (n,)
    waited_ns: Times  # (n,)
    first: Numbers  # (m + 1,)
    last: Numbers  # (m,) row of the last arrival, as an index into `index`
    all_arrived_ns: Times  # (m,)
    ended_ns: Times  # (m,) latest known end; the last arrival if no end is known

    def __len__(self) -> int:
        return len(self.last)


def calls_of(recording: RowSource, cell: int | None = None) -> Rows:
    """Return the calls of a cell, or all calls."""
    calls = recording.rows("call")
    chosen = calls["cell"] == cell if cell is not None else np.ones(len(calls), bool)
    return calls if chosen.all() else select(calls, chosen)


def prompt_of(recording: RowSource, cell: int) -> str:
    """Return the prompt of a cell, such as "In [8]"; "" if it has none or none is known yet."""
    if prompt := recording.prompts.get(cell):
        return prompt
    spans = recording.rows("span")
    names = spans["name"][(spans["kind"] == SPANS.index("cell")) & (spans["cell"] == cell)]
    return recording.text(int(names[0])) if len(names) else ""


def label_of(recording: RowSource, cell: int) -> str:
    """Return the displayed name of a cell: its prompt, "In [8]", or "cell 3" if it has none.

    If the notebook's kernel was restarted, two cells may have the same prompt: "In [8] (cell 3)".

    Example:
        >>> from ddp_notebook.widgets import simulate
        >>> label_of(simulate(world_size=2), 1)
        'cell 1'
    """
    prompt = prompt_of(recording, cell)
    if not prompt:
        return f"cell {cell}"
    is_one = all(words != prompt for other, words in list(recording.prompts.items()) if other != cell)
    return prompt if is_one else f"{prompt} (cell {cell})"


def numbers_of(recording: RowSource, cells: Iterable[int]) -> list[str]:
    """Return ["3 (In [6])", "4 (In [8])"], the numbers that `cell=` takes."""
    prompts = [(cell, prompt_of(recording, cell)) for cell in cells]
    return [f"{cell} ({prompt})" if prompt else str(cell) for cell, prompt in prompts]


def in_cell(recording: RowSource, cell: int | None) -> str:
    """Return " in In [8]", for the end of a sentence; "" for all cells."""
    return "" if cell is None else f" in {label_of(recording, cell)}"


def is_message(recording: RowSource, calls: Rows) -> npt.NDArray[np.bool_]:
    """Return a mask (n,) of the sends and receives."""
    first, of = distinct(calls["op"])
    return np.array([recording.text(int(op)) in POINT_TO_POINT for op in calls["op"][first]], bool)[of]


def arrivals(calls: Rows) -> Times:
    """Return the arrival time (n,) of each rank at its call. On a GPU it is that of the device, since the host runs
    ahead.
    """
    return np.maximum(calls["issue_ns"], calls["start_ns"])


def match_collectives(recording: RowSource, calls: Rows) -> Matched:
    """Match collectives that at least two ranks have recorded.

    Args:
        calls: (n,) rows of `records.CALL`.
    """
    chosen = np.flatnonzero(~is_message(recording, calls))
    rows = calls if len(chosen) == len(calls) else select(calls, chosen)
    groups = _codes(rows["group"], lambda number: str(recording.group_of(number)["name"]))
    return _match(recording, rows, chosen, (rows["cell"], groups, rows["number"]), by_op=True)


def match_messages(recording: RowSource, calls: Rows) -> Matched:
    """Match sends with their receives. A receive from any rank is left out, because its source is unknown.

    Args:
        calls: (n,) rows of `records.CALL`.
    """
    chosen = np.flatnonzero(is_message(recording, calls) & (calls["peer"] >= 0))
    if not len(chosen):
        return _nothing()
    rows = select(calls, chosen)
    is_send = _codes(rows["op"], recording.text, {"send": 1, "recv": 0}).astype(bool)
    groups = _codes(rows["group"], lambda number: str(recording.group_of(number)["name"]))
    source, destination = np.where(is_send, (rows["rank"], rows["peer"]), (rows["peer"], rows["rank"]))
    return _match(recording, rows, chosen, (rows["cell"], groups, source, destination, rows["tag"]), by_op=False)


def _codes(numbers: Rows, text: Any, codes: dict[str, int] | None = None) -> Numbers:
    """Return a code (n,) for each text. Equal texts have equal codes, in all calls with the same `codes`."""
    codes = {} if codes is None else codes
    first, back = distinct(numbers)
    found = [codes.setdefault(text(int(number)), len(codes)) for number in numbers[first]]
    return np.array(found, np.int64)[back]


def _match(
    recording: RowSource, rows: Rows, index: Numbers, keys: tuple[npt.NDArray[Any], ...], *, by_op: bool
) -> Matched:
    if len(rows) < 2:
        return _nothing()
    rank, arrived, ends = rows["rank"].astype(np.int64), arrivals(rows), rows["end_ns"]
    # The k-th call of a rank with a key matches the k-th of the others, because numbers start again with a new group.
    keys = (_packed(keys),)
    occurrence = np.zeros(len(rows), np.int64)
    if len(distinct(*keys, rank)[0]) < len(rows):
        order = np.lexsort((rows["issue_ns"], rank, *keys))
        occurrence[order] = np.arange(len(rows)) - _runs((*keys, rank), order)
    keys = (*keys, occurrence, rows["op"]) if by_op else (*keys, occurrence)
    keys = (_packed(keys),)

    order = np.argsort(_packed((rank, *keys)), kind="stable")
    of = _numbered(_runs(keys, order))
    has_others = (np.bincount(of) > 1)[of]
    order, of = order[has_others], of[has_others]
    if not len(order):
        return _nothing()
    counts = np.bincount(_numbered(of))
    first = np.concatenate(([0], np.cumsum(counts)))

    # Order by last arrival, which is the order of time.
    all_arrived = np.maximum.reduceat(arrived[order], first[:-1])
    by_time = np.argsort(all_arrived, kind="stable")
    begins, counts = first[by_time], counts[by_time]
    first = np.concatenate(([0], np.cumsum(counts)))
    order = order[np.arange(len(order)) + np.repeat(begins - first[:-1], counts)]
    of = np.repeat(np.arange(len(counts)), counts)
    rank, index, arrived, ends = rank[order], index[order], arrived[order], ends[order]
    all_arrived = all_arrived[by_time]

    is_last = arrived == all_arrived[of]
    last = np.empty(len(counts), np.int64)
    last[of[is_last]] = np.flatnonzero(is_last)  # NumPy keeps the last assignment to an index
    ended = np.maximum(np.maximum.reduceat(ends, first[:-1]), all_arrived)
    errors = np.array([recording.clock_error_ns(one) for one in range(int(rank.max()) + 1)], np.int64)
    waited = all_arrived[of] - arrived
    waited[waited <= errors[rank] + errors[rank[last]][of]] = 0
    lasted = np.where(ends >= 0, ends - arrived, waited)
    return Matched(
        index=index,
        of=of,
        arrived_ns=arrived,
        waited_ns=np.clip(lasted, 0, waited),
        first=first,
        last=last,
        all_arrived_ns=all_arrived,
        ended_ns=ended,
    )


def _nothing() -> Matched:
    none = np.empty(0, np.int64)
    return Matched(
        index=none,
        of=none,
        arrived_ns=none,
        waited_ns=none,
        first=np.zeros(1, np.int64),
        last=none,
        all_arrived_ns=none,
        ended_ns=none,
    )


def _packed(keys: tuple[npt.NDArray[Any], ...]) -> Numbers:
    """Return one number (n,) for the keys of each row, with the order of the keys.

    As in `np.lexsort`, the last key counts most. Sorting by one number is faster than sorting by several keys.

    Args:
        keys: (n,) each, at least one row.

    Example:
        >>> _packed((np.array([1, 0, 5]), np.array([2, 3, 2]))).tolist()
        [1, 6, 5]
    """
    packed = np.zeros(len(keys[0]), np.int64)
    limit = 1  # all numbers are below this limit
    for key in map(np.ascontiguousarray, keys):  # a column of a table would be read with gaps three times
        low, high = int(key.min()), int(key.max())
        if limit * (high - low + 1) >= _MOST:
            _, packed = np.unique(packed, return_inverse=True)
            values, key = np.unique(key, return_inverse=True)
            limit, low, high = len(packed), 0, len(values) - 1
        packed += (key.astype(np.int64) - low) * limit
        limit *= high - low + 1
    return packed


def _numbered(values: Numbers) -> Numbers:
    """Number ascending values from 0: equal values have equal numbers.

    Example:
        >>> _numbered(np.array([3, 3, 7, 9, 9])).tolist()
        [0, 0, 1, 2, 2]
    """
    return np.concatenate(([0], np.cumsum(values[1:] != values[:-1])))


def _runs(keys: tuple[npt.NDArray[Any], ...], order: Numbers) -> Numbers:
    """Return (n,) in this order, for each row, the start of its run of rows with equal keys."""
    is_new = np.zeros(len(order), bool)
    is_new[:1] = True
    for key in keys:
        ordered = key[order]
        is_new[1:] |= ordered[1:] != ordered[:-1]
    return np.maximum.accumulate(np.where(is_new, np.arange(len(order)), 0))
