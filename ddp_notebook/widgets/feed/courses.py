"""Courses of metrics. A course is all that the ranks have logged under one name in one cell.

Where a course has more rows than may travel, neighbouring rows of each rank form a bin, and the lowest and the highest
of each bin travel. So a picture keeps every peak, and no value is drawn that was not logged.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from ddp_notebook.records.schema import METRIC, Rows
from ddp_notebook.widgets.feed.tables import empty

ROW_BYTES = 13.0  # bytes per row of `metric` in a message, measured by tests/benchmarks/monitor.py
_LEAST = 4  # rows of one rank from which its course can be drawn: the first, the lowest, the highest, the last
_MOST_COURSES = 256  # whose sizes a message has


def thinned(rows: Rows, most: int) -> Rows:
    """Return about `most` rows of one course, in their order.

    Each rank keeps its first and its last row, and of each bin the lowest and the highest value and the first value
    that is not finite. A rank with few rows keeps them all.

    Args:
        rows: (n,) of `records.METRIC`, of one metric in one cell.
        most: rows of all ranks together.

    Example:
        >>> rows = np.zeros(100, METRIC)
        >>> rows["step"], rows["value"] = np.arange(100), np.arange(100) % 8
        >>> rows["value"][50] = 99
        >>> float(thinned(rows, 12)["value"].max())
        99.0
    """
    if len(rows) <= most:
        return rows
    order = np.lexsort((rows["step"], rows["rank"]))
    _, firsts, counts = np.unique(rows["rank"][order], return_index=True, return_counts=True)
    share = max(most // len(counts), 1)
    bins = np.where(counts <= share, counts, max(1, (share - 2) // 2))
    of = np.repeat(np.arange(len(counts)), counts)
    place = np.arange(len(rows)) - firsts[of]
    number = np.append(0, np.cumsum(bins))[of] + place * bins[of] // counts[of]
    values = rows["value"][order]
    is_finite = np.isfinite(values)
    by_value = np.lexsort((np.where(is_finite, values, 0.0), is_finite, number))  # non-finite values first in each bin
    begins = np.flatnonzero(np.diff(number[by_value], prepend=-1))
    ends = np.append(begins[1:], len(rows)) - 1
    lowest = np.minimum(begins + np.add.reduceat(~is_finite[by_value], begins), ends)
    kept = [by_value[begins], by_value[lowest], by_value[ends], firsts, firsts + counts - 1]
    return rows[np.sort(order[np.unique(np.concatenate(kept))])]


def newest_first(rows: Rows, most: int) -> Rows:
    """Return about `most` rows of all courses.

    The courses of the newest cell get what they need, or half of what is left, each metric the same share. Then comes
    the cell before. Of the oldest cells no rows are left; `courses` tells that they exist.

    Args:
        rows: (n,) of `records.METRIC`.
        most: rows of all courses together.
    """
    if len(rows) <= most:
        return rows
    by_cell: dict[int, list[npt.NDArray[np.int64]]] = {}
    for at in _split(rows):
        by_cell.setdefault(int(rows["cell"][at[0]]), []).append(at)
    found = [rows[:0]]
    left = most
    for cell in sorted(by_cell, reverse=True):
        size = sum(map(len, by_cell[cell]))
        room = left if size <= left or cell == min(by_cell) else left // 2
        kept = _shared([rows[at] for at in by_cell[cell]], room)
        found.append(kept)
        left -= len(kept)
    return np.concatenate(found[::-1])


def evenly(rows: Rows, most: int) -> Rows:
    """Return about `most` rows of all courses. Each gets the same share, and what shorter ones leave.

    Args:
        rows: (n,) of `records.METRIC`.
        most: rows of all courses together.
    """
    return rows if len(rows) <= most else _shared([rows[at] for at in _split(rows)], most)


def _shared(parts: list[Rows], room: int) -> Rows:
    """Return the thinned rows of some courses; none of a course whose share is too small to show its course."""
    found = [parts[0][:0]]
    parts = sorted(parts, key=len)
    for place, course in enumerate(parts):
        share = room // (len(parts) - place)
        if share >= min(len(course), _LEAST * len(np.unique(course["rank"]))):
            kept = thinned(course, share)
            found.append(kept)
            room -= len(kept)
    return np.concatenate(found)


def courses(rows: Rows) -> Rows:
    """Return rows of the table `course`: how many points each course has, its first and its last step, and whether the
    program gave all steps.

    Args:
        rows: (n,) of `records.METRIC`, before they are thinned.
    """
    parts = _split(rows)[-_MOST_COURSES:]
    found = empty("course", len(parts))
    for place, at in enumerate(parts):
        steps = rows["step"][at]
        is_given = rows["is_given"][at].all()
        found[place] = (rows["cell"][at[0]], rows["name"][at[0]], len(at), steps.min(), steps.max(), is_given)
    return found


def of_cells(rows: Rows, name: int | None, cells: Iterable[int] | None) -> Rows:
    """Return the rows of one metric in some cells; None: of all."""
    if name is not None:
        rows = rows[rows["name"] == name]
    return rows if cells is None else rows[np.isin(rows["cell"], [*cells])]


def _split(rows: Rows) -> list[npt.NDArray[np.int64]]:
    """Return the indexes of the rows of each course, by cell and name."""
    if not len(rows):
        return []
    key = rows["cell"].astype(np.int64) << 32 | rows["name"]
    order = np.argsort(key, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(key[order])) + 1)


class Flow:
    """Limits the rows of metrics that travel while they come.

    Args:
        bytes_per_s: of all metrics together.

    Example:
        >>> flow = Flow(bytes_per_s=1000)
        >>> rows = np.zeros(10_000, METRIC)
        >>> rows["step"] = rows["value"] = np.arange(10_000)
        >>> flow.add(rows)
        >>> travelling, sizes = flow.take(seconds=1.0)
        >>> len(travelling) < 100, sizes["points"].tolist(), flow.is_waiting
        (True, [10000.0], False)
    """

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._allowance = bytes_per_s
        self._waiting = np.zeros(0, METRIC)

    @property
    def is_waiting(self) -> bool:
        """Return whether rows wait until there is room for them."""
        return len(self._waiting) > 0

    def add(self, rows: Rows) -> None:
        """Take in rows that have come."""
        self._waiting = np.concatenate((self._waiting, rows)) if self.is_waiting else rows

    def take(self, seconds: float) -> tuple[Rows, Rows]:
        """Return all that wait, thinned if there is too little room for them; nothing, if there is room for less than
        the first, lowest, highest and last of each.

        Args:
            seconds: since the last time.

        Returns:
            Rows of `records.METRIC`, and rows of `course` for all that have come, thinned or not.
        """
        rows = self._waiting
        if not len(rows):
            self._allowance = min(self._allowance + self._bytes_per_s * seconds, self._bytes_per_s)
            return rows, empty("course")
        least = _LEAST * len(np.unique(rows[["cell", "name", "rank"]])) * ROW_BYTES
        most = max(self._bytes_per_s, least)
        self._allowance = min(self._allowance + self._bytes_per_s * seconds, most)
        room = int(self._allowance / ROW_BYTES)
        kept = rows
        if len(rows) > room:
            if self._allowance < least:
                return rows[:0], empty("course")
            parts = _split(rows)
            kept = np.concatenate([thinned(rows[at], max(1, room * len(at) // len(rows))) for at in parts])
        self._waiting = rows[:0]
        self._allowance -= len(kept) * ROW_BYTES
        return kept, courses(rows)
