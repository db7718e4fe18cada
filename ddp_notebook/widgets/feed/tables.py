"""Tables in messages to the browser: their columns and their compact encoding.

Times are milliseconds since the start of the recording, durations milliseconds, sizes bytes. A column of type `TEXT`
holds the number of a text. Unknown values are NaN; an unknown number of samples is -1.

| table | one row |
|---|---|
| `metric` | one number that a rank has logged |
| `course` | size of one metric in one cell on all ranks, whether its rows of `metric` are sent or not |
| `step` | durations of one step on one rank |
| `bucket` | one gradient bucket of one step on one rank |
| `span` | an interval of the timeline: a part of a step, a collective, a message, one end of a remote call, a cell |
| `value` | values of the tensors of one side of a collective |
| `rank` | current state of a rank |
| `whole` | a whole tensor, whose elements are in the same message |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ddp_notebook.records.schema import Rows

TEXT = "<u4"
KINDS = (  # kinds of spans
    *("cell", "forward", "backward", "optimizer", "input", "input gradient", "weight gradient", "pipeline", "block"),
    "execution",  # remote call, on its callee
    *("collective", "send", "recv", "remote call"),
)
FIRST = 32  # values of a tensor that are sent

PARTS = ("input", "forward", "backward", "optimizer", "compute", "overlapped", "exposed", "waiting", "rest")

FEED_TABLES: dict[str, np.dtype[np.void]] = {
    "metric": np.dtype(
        [("rank", "<u2"), ("name", TEXT), ("cell", "<u4"), ("step", "<f8"), ("value", "<f4"), ("time", "<f8")]
    ),
    "course": np.dtype(
        [
            ("cell", "<u4"),
            ("name", TEXT),
            ("points", "<f8"),
            ("begin", "<f8"),
            ("end", "<f8"),
            ("is_given", "u1"),
            ("unit", "u1"),  # unit of the steps, an index of `records.STEP_UNITS`
        ]
    ),
    "step": np.dtype(
        [
            ("rank", "<u2"),
            ("cell", "<u4"),
            ("step", "<u4"),
            ("start", "<f8"),
            ("duration", "<f4"),
            *((part, "<f4") for part in PARTS),
            ("samples", "<i4"),
        ]
    ),
    "bucket": np.dtype(
        [
            ("rank", "<u2"),
            ("cell", "<u4"),
            ("step", "<u4"),
            ("bucket", "<u2"),
            ("nbytes", "<f8"),
            ("start", "<f8"),
            ("end", "<f8"),
            ("model", TEXT),
        ]
    ),
    "span": np.dtype(
        [
            ("rank", "<u2"),
            ("kind", "u1"),
            ("name", TEXT),
            ("cell", "<u4"),
            ("step", "<u4"),
            ("start", "<f8"),
            ("end", "<f8"),
            ("thread", "<u2"),
            ("op", TEXT),
            ("group", TEXT),
            ("number", "<u4"),
            ("call", "<f8"),
            ("nbytes", "<f8"),
            ("wait", "<f4"),
            ("origin", "u1"),
            ("site", TEXT),
            ("state", "u1"),
            ("left_out", "u1"),
            ("peer", "<i4"),  # the other rank of a remote call; -1: none
        ]
    ),
    "value": np.dtype(
        [
            ("rank", "<u2"),
            ("call", "<f8"),
            ("kind", "u1"),
            ("cell", "<u4"),
            ("group", TEXT),
            ("number", "<u4"),
            ("op", TEXT),
            ("side", "u1"),
            ("dtype", TEXT),
            ("shape", TEXT),
            ("numel", "<f8"),
            ("looked_at", "<f8"),
            ("low", "<f4"),
            ("high", "<f4"),
            ("mean", "<f4"),
            ("nans", "<f8"),
            ("infs", "<f8"),
            ("count", "u1"),
            ("first", "<f4", (FIRST,)),
        ]
    ),
    "rank": np.dtype(
        [
            ("rank", "<u2"),
            ("state", TEXT),
            ("line", TEXT),
            ("cpu", "<f4"),
            ("rss", "<f8"),
            ("host_used", "<f8"),
            ("host_total", "<f8"),
            ("gpu_allocated", "<f8"),
            ("gpu_total", "<f8"),
            ("gpu", "<f4"),
            ("last", TEXT),
            ("waits_for", TEXT),
            ("time", "<f8"),
        ]
    ),
    "whole": np.dtype(
        [("rank", "<u2"), ("side", "u1"), ("dtype", TEXT), ("shape", TEXT), ("offset", "<f8"), ("count", "<f8")]
    ),
}
TEXTS = {
    "metric": ("name",),
    "course": ("name",),
    "step": (),
    "bucket": ("model",),
    "span": ("name", "op", "group", "site"),
    "value": ("group", "op", "dtype", "shape"),
    "rank": ("state", "line", "last", "waits_for"),
    "whole": ("dtype", "shape"),
}
_ALIGNMENT = 8
_RESOLUTIONS = (1e-4, 1e-3)  # ms; times have a resolution of 0.1 us if a message covers less than seven minutes
UNSIGNED = (np.dtype("u1"), np.dtype("<u2"), np.dtype("<u4"))


def empty(table: str, count: int = 0) -> Rows:
    """Return `count` rows of zeros."""
    return np.zeros(count, FEED_TABLES[table])


def pack(tables: Mapping[str, Rows]) -> tuple[dict[str, Any], bytes]:
    """Pack tables into a description for the header and one buffer.

    A column with a single value is stored in the header. Whole numbers and times are stored as differences from the
    minimum, in the smallest type that holds them. Times are exact to 0.1 us, everything else is exact.

    Args:
        tables: Rows of `FEED_TABLES` by table name. Tables without rows are left out.

    Returns:
        Description by table name, `{"rows": n, "columns": [...]}`, and the buffer. A column is `[name, value]`,
        `[name, dtype, offset]`, or `[name, dtype, offset, scale, base]`. The values of the last form are
        `raw * scale + base`, and the greatest raw number means NaN.

    Example:
        >>> rows = empty("metric", 2)
        >>> rows["step"] = [1000, 1001]
        >>> header, data = pack({"metric": rows})
        >>> header["metric"]["columns"][3], data[:2]
        (['step', 'u1', 0, 1, 1000.0], b'\\x00\\x01')
    """
    header: dict[str, Any] = {}
    pieces: list[bytes] = []
    at = 0
    for table, rows in tables.items():
        if not len(rows):
            continue
        columns: list[list[Any]] = []
        for name in rows.dtype.names or ():
            column = _pack_first(rows) if name == "first" else _pack(rows[name])
            if isinstance(column, _Raw):
                data = column.values.tobytes()
                columns.append([name, column.dtype, at, *column.scaling])
                pieces += [data, b"\0" * (-len(data) % _ALIGNMENT)]
                at += len(data) + -len(data) % _ALIGNMENT
            else:
                columns.append([name, column])
        header[table] = {"rows": len(rows), "columns": columns}
    return header, b"".join(pieces)


class _Raw:
    """Column with one value for each row."""

    __slots__ = ("dtype", "scaling", "values")

    def __init__(self, values: npt.NDArray[Any], scaling: tuple[float, ...] = (), width: int = 1) -> None:
        self.values = values
        self.scaling = scaling
        self.dtype = (str(width) if width > 1 else "") + values.dtype.str[1:]


def _pack(column: npt.NDArray[Any]) -> Any:
    """Return the value of a constant column, or the packed column."""
    first = column[0].item()
    if (column == first).all() and first - first == 0:  # JSON has no infinity
        return first
    if column.dtype.kind != "f":
        least = int(column.min())
        return _narrow(column.astype(np.int64) - least, int(column.max()) - least, 1, least, column)
    is_number = column == column
    if not is_number.all():
        numbers = column[is_number]
        if not len(numbers):
            return None
    else:
        numbers = column
    if column.dtype.itemsize == 4:
        return _Raw(np.ascontiguousarray(column))
    low, high = float(numbers.min()), float(numbers.max())
    if not np.isfinite(high - low):
        return _Raw(np.ascontiguousarray(column))
    is_whole = bool((numbers == np.rint(numbers)).all())
    for scale in (1,) if is_whole else _RESOLUTIONS:
        if (high - low) / scale < 4e9:
            return _narrow(np.rint((column - low) / scale), (high - low) / scale, scale, low, column)
    return _Raw(np.ascontiguousarray(column))


def _narrow(raw: npt.NDArray[Any], most: float, scale: float, base: float, column: npt.NDArray[Any]) -> _Raw:
    """Store integers from 0 to `most`, which may include NaN, in the smallest unsigned type that holds them."""
    for dtype in UNSIGNED:
        greatest = np.iinfo(dtype).max
        if dtype.itemsize < column.dtype.itemsize and most + 1 < greatest:
            if raw.dtype.kind == "f":
                raw = np.where(raw == raw, raw, greatest)
            return _Raw(raw.astype(dtype), (scale, base))
    return _Raw(np.ascontiguousarray(column))


def _pack_first(rows: Rows) -> Any:
    """Pack the first values of tensors, with the width of the longest row."""
    width = max(1, int(rows["count"].max()))
    return _Raw(np.ascontiguousarray(rows["first"][:, :width]), width=width)
