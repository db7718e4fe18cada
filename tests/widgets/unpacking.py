"""Unpacks a message like `js/data/unpack.js` in the browser, so that tests see the same data as a view."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddp_notebook.widgets.feed.tables import FEED_TABLES


def unpack(header: dict[str, Any], data: bytes) -> dict[str, Any]:
    """Return the tables of a message, as arrays of `FEED_TABLES`."""
    return {name: _table(name, table, data) for name, table in header["tables"].items()}


def _table(name: str, table: dict[str, Any], data: bytes) -> Any:
    rows = np.zeros(table["rows"], FEED_TABLES[name])
    for column, *how in table["columns"]:
        if len(how) == 1:
            rows[column] = np.nan if how[0] is None else how[0]
            continue
        dtype, offset, *scaling = how
        width = int(dtype[:-2] or 1)
        raw = np.frombuffer(data, "<" + dtype[-2:], len(rows) * width, offset)
        if column == "first":
            rows[column][:, :width] = raw.reshape(len(rows), width)
        elif scaling:
            scale, base = scaling
            values = raw.astype(np.float64) * scale + base
            rows[column] = (
                np.where(raw == np.iinfo(raw.dtype).max, np.nan, values) if _is_float(rows, column) else values
            )
        else:
            rows[column] = raw
    return rows


def _is_float(rows: Any, column: str) -> bool:
    return rows.dtype[column].kind == "f"
