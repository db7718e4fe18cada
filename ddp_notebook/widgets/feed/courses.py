"""Courses of metrics. A course holds all values that the ranks have logged under one name in one cell.

If a course has more rows than may be sent, neighbouring rows of each rank form a bin. Only the lowest and the highest
row of each bin are sent. So a picture keeps every peak, and every drawn value was logged.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from ddp_notebook.records.schema import METRIC, Rows
from ddp_notebook.widgets.feed.tables import empty

ROW_BYTES = 13.0  # bytes per row of `metric` in a message, measured by tests/benchmarks/monitor.py
_LEAST = 4  # fewest rows to draw the course of one rank: first, lowest, highest, last
MOST_NAMES = 256  # most names of one cell that views draw
_MOST_COURSES = 256  # courses whose sizes a message contains
_MOST_WAITING = 1 << 17  # rows
_CELLS = 4  # newest cells whose left-out names are counted


def thinned(rows: Rows, most: int) -> Rows:
    """Return about `most` rows of one course, in their order.

    Each rank keeps its first and last row. From each bin it keeps the lowest value, the highest value and the first
    value that is not finite. A rank with few rows keeps them all.

    Args:
        rows: (n,) Rows of `records.METRIC`, of one metric in one cell.
        most: Limit for the rows of all ranks together.

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
    """Return about `most` rows of all courses, mainly of the newest cells.

    The courses of the newest cell get all rows that they need, or half of the remaining room, in equal shares. Then
    follows the cell before it. The oldest cells may get no rows; `courses` still lists them.

    Args:
        rows: (n,) Rows of `records.METRIC`.
        most: Limit for the rows of all courses together.
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
    """Return about `most` rows of all courses. Each course gets an equal share, and the room that shorter courses
    leave.

    Args:
        rows: (n,) Rows of `records.METRIC`.
        most: Limit for the rows of all courses together.
    """
    return rows if len(rows) <= most else _shared([rows[at] for at in _split(rows)], most)


def _shared(parts: list[Rows], room: int) -> Rows:
    """Return the thinned rows of some courses. A course gets no rows if its share is too small to show its shape."""
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
    """Return one row of the table `course` for each course.

    A row has the number of points, the first and last step and the unit of the steps. It also shows whether the program
    passed all steps.

    Args:
        rows: (n,) Rows of `records.METRIC`, before they are thinned.
    """
    return _sizes(rows)[-_MOST_COURSES:]


def _sizes(rows: Rows) -> Rows:
    """Return a row of the table `course` for each course."""
    logged = empty("course", len(rows))
    for name in ("cell", "name", "is_given", "unit"):
        logged[name] = rows[name]
    logged["points"], logged["begin"], logged["end"] = 1, rows["step"], rows["step"]
    return _added(logged)


def _added(sizes: Rows) -> Rows:
    """Merge several rows of the table `course` into one row for each course, sorted by cell and name."""
    if not len(sizes):
        return sizes
    key = _keys(sizes)
    order = np.argsort(key, kind="stable")
    sizes, begins = sizes[order], np.flatnonzero(np.diff(key[order], prepend=-1))
    found = sizes[begins]
    of_columns = {"points": np.add, "begin": np.minimum, "end": np.maximum, "is_given": np.minimum, "unit": np.maximum}
    for name, of in of_columns.items():
        found[name] = of.reduceat(sizes[name], begins)
    return found


def of_cells(rows: Rows, name: int | None, cells: Iterable[int] | None) -> Rows:
    """Return the rows of one metric in some cells; None for all."""
    if name is not None:
        rows = rows[rows["name"] == name]
    return rows if cells is None else rows[np.isin(rows["cell"], [*cells])]


def _split(rows: Rows) -> list[npt.NDArray[np.int64]]:
    """Return the indexes of the rows of each course, by cell and name."""
    if not len(rows):
        return []
    key = _keys(rows)
    order = np.argsort(key, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(key[order])) + 1)


def _keys(rows: Rows) -> npt.NDArray[np.int64]:
    """Return the key of the course of each row. Keys sort by cell and name."""
    key: npt.NDArray[np.int64] = rows["cell"].astype(np.int64) << 32 | rows["name"]
    return key


class DrawnNames:
    """Selects the names that views draw: the first `MOST_NAMES` of each cell.

    Example:
        >>> names = DrawnNames()
        >>> rows = np.zeros(1000, METRIC)
        >>> rows["cell"], rows["name"] = 3, np.arange(1000)
        >>> len(names.choose(rows)), names.left_out
        (256, (3, 744))
    """

    def __init__(self) -> None:
        self._chosen: dict[int, npt.NDArray[np.int64]] = {}  # by cell
        self._refused: dict[int, npt.NDArray[np.bool_]] = {}  # flags by the number of the name, for each cell

    def choose(self, rows: Rows) -> Rows:
        """Return the rows whose names are drawn.

        Args:
            rows: (n,) Rows of `records.METRIC`.
        """
        if not len(rows):
            return rows
        keys = _keys(rows)
        courses, firsts = np.unique(keys, return_index=True)
        begins = np.flatnonzero(np.diff(courses >> 32, prepend=-1)).tolist()
        is_whole = True
        for begin, end in zip(begins, [*begins[1:], len(courses)], strict=True):
            mine = courses[begin:end][np.argsort(firsts[begin:end])]
            is_whole &= self._take(int(mine[0] >> 32), mine)
        if is_whole:
            return rows
        chosen = [self._chosen[cell] for cell in np.unique(courses[begins] >> 32).tolist()]
        return rows[np.isin(keys, np.concatenate(chosen))]

    def _take(self, cell: int, courses: npt.NDArray[np.int64]) -> bool:
        """Add courses of one cell. Return whether all of them are drawn."""
        chosen = self._chosen.get(cell, courses[:0])
        new = courses[~np.isin(courses, chosen)]
        room = MOST_NAMES - len(chosen)
        if len(new) and room:
            self._chosen[cell] = np.concatenate((chosen, new[:room]))
        if len(new) <= room:
            return True
        names = new[room:] & 0xFFFFFFFF
        refused = self._refused.get(cell, np.zeros(0, bool))
        if len(refused) <= names.max():
            refused = np.concatenate((refused, np.zeros(max(len(refused), int(names.max()) + 1), bool)))
        refused[names] = True
        self._refused[cell] = refused
        for old in sorted(self._refused)[:-_CELLS]:
            del self._refused[old]
        return False

    @property
    def left_out(self) -> tuple[int, int]:
        """Return the newest cell that has more names than are drawn, and the number of its names that are not drawn.

        Returns zeros if there is no such cell.
        """
        if not self._refused:
            return 0, 0
        cell = max(self._refused)
        return cell, int(np.count_nonzero(self._refused[cell]))


class Flow:
    """Rate limiter for the rows of metrics.

    Args:
        bytes_per_s: Limit for all metrics together.

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
        self._sizes = empty("course")  # sizes of the first `_counted` waiting rows
        self._counted = 0
        self._least = 0.0  # minimum size of the waiting rows in bytes; new rows never reduce it
        self._most_waiting = _MOST_WAITING

    @property
    def is_waiting(self) -> bool:
        """Return whether rows wait until they may be sent."""
        return len(self._waiting) > 0

    def add(self, rows: Rows) -> None:
        """Add new rows."""
        self._waiting = np.concatenate((self._waiting, rows)) if self.is_waiting else rows
        if len(self._waiting) > self._most_waiting and self._bytes_per_s < np.inf:
            self._thin()

    def _thin(self) -> None:
        """Halve the waiting rows, because the ranks of a large session log faster than rows may be sent."""
        self._count()
        parts = _split(self._waiting)
        share = max(1, _MOST_WAITING // 2 // len(parts))
        self._waiting = np.concatenate([thinned(self._waiting[at], share) for at in parts])
        self._counted = len(self._waiting)
        self._most_waiting = max(_MOST_WAITING, 2 * self._counted)

    def _count(self) -> None:
        self._sizes = _added(np.concatenate((self._sizes, _sizes(self._waiting[self._counted :]))))
        self._counted = len(self._waiting)

    def take(self, seconds: float) -> tuple[Rows, Rows]:
        """Return all waiting rows, thinned to the available room.

        Returns no rows if there is not even room for the first, lowest, highest and last row of each course.

        Args:
            seconds: Time since the last call.

        Returns:
            Rows of `records.METRIC`, and rows of `course` for all rows that were added, sent or not.
        """
        rows = self._waiting
        if not len(rows):
            self._allowance = min(self._allowance + self._bytes_per_s * seconds, self._bytes_per_s)
            return rows, empty("course")
        self._allowance += self._bytes_per_s * seconds
        if self._allowance < self._least:
            return rows[:0], empty("course")
        parts = _split(rows)
        series = sum(len(np.unique(rows["rank"][at])) for at in parts)
        self._least = least = _LEAST * series * ROW_BYTES
        self._allowance = min(self._allowance, max(self._bytes_per_s, least))
        room = self._allowance / ROW_BYTES  # rows; a saved page has no limit
        kept = rows
        if len(rows) > room:
            if self._allowance < least:
                return rows[:0], empty("course")
            kept = np.concatenate([thinned(rows[at], max(1, int(room) * len(at) // len(rows))) for at in parts])
        self._count()
        sizes = self._sizes[-_MOST_COURSES:]
        self._waiting, self._sizes, self._counted, self._least = rows[:0], empty("course"), 0, 0.0
        self._allowance -= len(kept) * ROW_BYTES
        return kept, sizes
