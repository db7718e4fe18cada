"""Rows with a growing index, in bounded memory, for one writer and any number of independent readers."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ddp_notebook.records.schema import Rows

_FIRST_CAPACITY = 256
# growth factor of the address space: pages are allocated when rows are written, and each growth copies all rows
_GROWTH = 8
_BLOCK = 4096  # rows that are read together


@functools.cache
def as_whole(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type of a row that is copied as one unit.

    NumPy copies a structured row column by column: appending 20 rows took 15 us, and takes 1.6 us with this type.
    """
    return np.dtype(("V", dtype.itemsize))


def select(rows: Rows, chosen: npt.NDArray[np.bool_] | npt.NDArray[np.intp]) -> Rows:
    """Return `rows[chosen]`, ten times as fast: each row is copied as one unit.

    Args:
        rows: (n,) structured.
        chosen: a mask (n,), or indexes.
    """
    return rows.view(as_whole(rows.dtype))[chosen].view(rows.dtype)


class RingBuffer:
    """The last rows of a table. Row number i always has index i; the oldest rows are dropped first.

    Memory grows with the number of rows, up to `capacity` rows. Readers get copies, so their data does not change, and
    the writer only waits for the copy.

    Args:
        dtype: type of a row.
        capacity: number of kept rows, at least 1.

    Example:
        >>> ring = RingBuffer(np.dtype("<i8"), capacity=4)
        >>> ring.append(np.arange(6))
        >>> ring.first, ring.end, ring.all().tolist()
        (2, 6, [2, 3, 4, 5])
        >>> rows, seen, lost = ring.since(0)
        >>> rows.tolist(), seen, lost
        ([2, 3, 4, 5], 6, 2)
    """

    def __init__(self, dtype: np.dtype[Any], capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self.capacity = capacity
        self._dtype = np.dtype(dtype)
        self._rows = np.empty(min(capacity, _FIRST_CAPACITY), as_whole(self._dtype))
        self._end = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return min(self._end, self.capacity)

    def __repr__(self) -> str:
        return f"<RingBuffer: rows {self.first} to {self.end}, at most {self.capacity}>"

    @property
    def first(self) -> int:
        """Index of the oldest kept row."""
        return max(0, self._end - self.capacity)

    @property
    def end(self) -> int:
        """Index of the next row."""
        return self._end

    @property
    def nbytes(self) -> int:
        """Upper bound of the used memory in bytes."""
        return self._rows.nbytes

    def append(self, rows: npt.NDArray[Any]) -> None:
        """Add rows. Only one thread may call it."""
        if rows.dtype != self._dtype:
            rows = rows.astype(self._dtype)
        with self._lock:
            end = self._end + len(rows)
            if len(self._rows) < min(end, self.capacity):
                self._grow(end)
            rows = rows.view(self._rows.dtype)[max(0, len(rows) - len(self._rows)) :]
            at = (end - len(rows)) % len(self._rows)
            behind = min(len(rows), len(self._rows) - at)
            self._rows[at : at + behind] = rows[:behind]
            if behind < len(rows):
                self._rows[: len(rows) - behind] = rows[behind:]
            self._end = end

    def since(self, index: int, most: int | None = None) -> tuple[Rows, int, int]:
        """Return `(new rows for a reader, index for its next call, number of rows that it lost)`.

        Args:
            index: position of the reader, from 0; the index that its last call returned.
            most: limit of rows; None: all.
        """
        with self._lock:
            begin = min(max(index, self.first, 0), self._end)
            end = self._end if most is None else min(self._end, begin + most)
            return self._copy(begin, end), end, max(0, begin - max(index, 0))

    def all(self) -> Rows:
        """Return all kept rows, the oldest first."""
        return self.since(0)[0]

    def columns(self, names: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
        """Return copies of some columns of all kept rows, the oldest first. This is faster than a copy of whole rows.

        Example:
            >>> ring = RingBuffer(np.dtype([("a", "<i4"), ("b", "<i4")]), capacity=2)
            >>> ring.append(np.array([(1, 2), (3, 4), (5, 6)], "<i4, <i4").astype([("a", "<i4"), ("b", "<i4")]))
            >>> ring.columns(["b"])["b"].tolist()
            [4, 6]
        """
        with self._lock:
            at, count = self.first % len(self._rows), self._end - self.first
            rows = self._rows.view(self._dtype)
            found = {name: np.empty(count, self._dtype[name]) for name in names}
            for part, to in ((rows[at : at + count], 0), (rows[: max(0, at + count - len(rows))], len(rows) - at)):
                for begin in range(0, len(part), _BLOCK):  # the columns of a block are in the same cache lines
                    block = part[begin : begin + _BLOCK]
                    for name, column in found.items():
                        column[to + begin : to + begin + len(block)] = block[name]
            return found

    def row(self, index: int) -> np.void | None:
        """Return one row, or None if it was dropped or does not exist yet."""
        with self._lock:
            if not self.first <= index < self._end:
                return None
            return self._rows.view(self._dtype)[index % len(self._rows)].copy()

    def take(self, indexes: npt.NDArray[np.integer]) -> tuple[Rows, npt.NDArray[np.bool_]]:
        """Return copies of the rows with these indexes, and a mask of those that are still kept.

        Example:
            >>> ring = RingBuffer(np.dtype("<i8"), capacity=4)
            >>> ring.append(np.arange(6))
            >>> rows, is_kept = ring.take(np.array([1, 4]))
            >>> rows[is_kept].tolist(), is_kept.tolist()
            ([4], [False, True])
        """
        with self._lock:
            return self._rows[indexes % len(self._rows)].view(self._dtype), indexes >= self.first

    def _copy(self, begin: int, end: int) -> Rows:
        count, size = end - begin, len(self._rows)
        at = begin % size
        if at + count <= size:
            return self._rows[at : at + count].copy().view(self._dtype)
        return np.concatenate((self._rows[at:], self._rows[: at + count - size])).view(self._dtype)

    def _grow(self, needed: int) -> None:
        # Until the buffer is full, rows start at its front, so growing does not reorder them.
        size = len(self._rows)
        while size < min(needed, self.capacity):
            size = min(size * _GROWTH, self.capacity)
        grown = np.empty(size, self._rows.dtype)
        grown[: self._end] = self._rows[: self._end]
        self._rows = grown
