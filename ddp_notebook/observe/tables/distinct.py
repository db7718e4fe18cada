"""Distinct combinations of values in columns, without sorting where the values are small numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_SPARE = 4  # a table of all possible values may have this number of entries for each row
_SMALL = 1 << 16
Numbers = npt.NDArray[np.int64]


def distinct(*columns: npt.NDArray[Any]) -> tuple[Numbers, Numbers]:
    """Number the distinct combinations of values from 0, in the order of the values.

    Args:
        columns: (n,) integers each; differences within a column stay below 2**32.

    Returns:
        The first row (m,) of each combination, and the number (n,) of the combination of each row.

    Example:
        >>> first, of = distinct(np.array([5, 2, 5, 5]), np.array([1, 1, 1, 0]))
        >>> first.tolist(), of.tolist()
        ([1, 3, 0], [2, 0, 2, 1])
    """
    of, count = np.zeros(len(columns[0]), np.int64), 1
    if not len(of):
        return of, of
    for column in map(np.ascontiguousarray, columns):  # a column of a table would be read with gaps three times
        low, high = int(column.min()), int(column.max())
        of, count = _compacted(of * (high - low + 1) + (column.astype(np.int64) - low), count * (high - low + 1))
    first = np.empty(count, np.int64)
    first[of[::-1]] = np.arange(len(of))[::-1]  # NumPy keeps the last assignment to an index
    return first, of


def _compacted(values: Numbers, limit: int) -> tuple[Numbers, int]:
    """Return the position of each value among the distinct values, and their number.

    Args:
        values: (n,) from 0 to limit - 1.
    """
    if limit > _SPARE * len(values) + _SMALL:
        unique, of = np.unique(values, return_inverse=True)
        return of, len(unique)
    is_used = np.zeros(limit, bool)
    is_used[values] = True
    return (np.cumsum(is_used) - 1)[values], int(np.count_nonzero(is_used))
