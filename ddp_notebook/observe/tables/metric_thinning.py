"""Metrics that were dropped from a full table: keep some values of each curve."""

from __future__ import annotations

import threading
from collections import deque

import numpy as np
import numpy.typing as npt

from ddp_notebook.records.schema import Rows

MOST = 1 << 17  # the table itself holds twice as many rows
_WIDEST = 1 << 40
_SERIES = ("rank", "name", "cell")
Indexes = npt.NDArray[np.int64]


class Earlier:
    """Rows that were dropped from the `metric` table, with their indexes. One thread adds rows, any number read them.

    Args:
        dtype: type of a row.
        most: number of rows above which they are thinned to about half.
    """

    def __init__(self, dtype: np.dtype[np.void], most: int = MOST) -> None:
        self._dtype = dtype
        self._most = most
        self._parts: deque[tuple[Rows, Indexes]] = deque()
        self._count = 0
        self._width = 1  # indexes per range; each range keeps its extremes
        self._lock = threading.Lock()

    def add(self, rows: Rows, first: int) -> None:
        """Add rows.

        Args:
            first: index of the first row.
        """
        part = rows, np.arange(first, first + len(rows), dtype=np.int64)
        with self._lock:
            self._parts.append(part)
            self._count += len(rows)
            if self._count > self._most:
                whole, indexes = self._joined()
                kept = thinned(whole, indexes // self._width)
                while len(kept) > self._most // 2 and self._width < _WIDEST:
                    self._width *= 2
                    kept = thinned(whole, indexes // self._width)
                kept = kept[-self._most :]  # there are more curves than rows
                self._parts.clear()
                self._parts.append((whole[kept], indexes[kept]))
                self._count = len(kept)

    def before(self, index: int) -> tuple[Rows, Indexes]:
        """Return copies of the rows with lower indexes than this one, and their indexes."""
        with self._lock:
            rows, indexes = self._joined()
        end = int(np.searchsorted(indexes, index))
        return rows[:end], indexes[:end]

    def _joined(self) -> tuple[Rows, Indexes]:
        none = np.zeros(0, self._dtype), np.zeros(0, np.int64)
        parts = [none, *self._parts]
        return np.concatenate([rows for rows, _ in parts]), np.concatenate([indexes for _, indexes in parts])


def thinned(rows: Rows, ranges: Indexes) -> Indexes:
    """Select rows that show the course of each curve.

    In each range these are the least and the greatest value, and the first NaN. The first row of each curve is kept,
    too.

    Args:
        rows: (n,) of `metric`, in the order of arrival.
        ranges: (n,) number of each row's range, ascending.

    Returns:
        Indexes of the selected rows, in order.

    Example:
        >>> rows = np.zeros(8, [("rank", "<i4"), ("name", "<u4"), ("cell", "<u4"), ("value", "<f8")])
        >>> rows["value"] = [5, 1, 9, 3, 2, 2, 2, np.nan]
        >>> thinned(rows, np.arange(8) // 4).tolist()
        [0, 1, 2, 4, 6, 7]
    """
    if not len(rows):
        return np.zeros(0, np.int64)
    is_number = ~np.isnan(rows["value"])
    by_value = np.lexsort((rows["value"], is_number, ranges, *(rows[name] for name in _SERIES)))
    parts = [is_number[by_value], ranges[by_value], *(rows[name][by_value] for name in _SERIES)]
    begins = np.ones(len(rows), bool)
    begins[1:] = np.any([one[1:] != one[:-1] for one in parts], axis=0)
    least = np.flatnonzero(begins)
    greatest = np.append(least[1:], len(rows)) - 1
    greatest = np.where(is_number[by_value[least]], greatest, least)
    _, firsts = np.unique(rows[[*_SERIES]], return_index=True)
    return np.unique(np.concatenate([by_value[least], by_value[greatest], firsts]))
