"""Rows with a growing index, in bounded memory: one thread writes, any number read, each at its own pace."""

from __future__ import annotations

import functools
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from ddp_notebook.records.schema import Rows

_FIRST_CAPACITY = 256
_GROWTH = 8  # times, of address space: pages come as rows are written, and each growth copies all rows


@functools.cache
def as_whole(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type of a row that is copied as one. NumPy copies a structured row column by column: to append 20 rows took
    15 us so, and takes 1.6."""
    return np.dtype(("V", dtype.itemsize))


def select(rows: Rows, chosen: npt.NDArray[np.bool_] | npt.NDArray[np.intp]) -> Rows:
    """Return `rows[chosen]`, ten times as fast: each row is copied as one.

    Args:
        rows: (n,) structured.
        chosen: a mask (n,), or indexes.
    """
    return rows.view(as_whole(rows.dtype))[chosen].view(rows.dtype)


class RingBuffer:
    """The last rows of a table. Row number i keeps its index i for ever; the oldest rows go first.

    Memory grows as rows come, up to `capacity` rows, and stays there. Readers get copies: what they hold does not
    change, and costs the writer nothing but the time of the copy.

    Args:
        dtype: of a row.
        capacity: rows that are kept, at least 1.

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
            raise ValueError(f"a ring of {capacity} rows holds nothing; its capacity is at least 1")
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
        """The index of the oldest row that is kept."""
        return max(0, self._end - self.capacity)

    @property
    def end(self) -> int:
        """The index that the next row will have."""
        return self._end

    @property
    def nbytes(self) -> int:
        """Memory that it takes now at most."""
        return self._rows.nbytes

    def append(self, rows: npt.NDArray[Any]) -> None:
        """Add rows. Only one thread may do so."""
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
        """What a reader has not seen yet: `(rows, the index to ask from next, rows that were lost to it)`.

        Args:
            index: where the reader is, from 0; what it was told at its last call.
            most: rows; None: all.
        """
        with self._lock:
            begin = min(max(index, self.first, 0), self._end)
            end = self._end if most is None else min(self._end, begin + most)
            return self._copy(begin, end), end, max(0, begin - max(index, 0))

    def all(self) -> Rows:
        """Every row that is kept, the oldest first."""
        return self.since(0)[0]

    def row(self, index: int) -> np.void | None:
        """One row; None where it is not kept any more, or not there yet."""
        with self._lock:
            if not self.first <= index < self._end:
                return None
            return self._rows.view(self._dtype)[index % len(self._rows)].copy()

    def _copy(self, begin: int, end: int) -> Rows:
        count, size = end - begin, len(self._rows)
        at = begin % size
        if at + count <= size:
            return self._rows[at : at + count].copy().view(self._dtype)
        return np.concatenate((self._rows[at:], self._rows[: at + count - size])).view(self._dtype)

    def _grow(self, needed: int) -> None:
        # Until it is full, rows lie from the front: growing need not turn anything round.
        size = len(self._rows)
        while size < min(needed, self.capacity):
            size = min(size * _GROWTH, self.capacity)
        grown = np.empty(size, self._rows.dtype)
        grown[: self._end] = self._rows[: self._end]
        self._rows = grown
