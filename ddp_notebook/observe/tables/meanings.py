"""Convert codes, texts and rows of a recording's tables to objects."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ddp_notebook.observe.views import Preview
from ddp_notebook.records.schema import first_values


def preview_of(row: np.void, text: Callable[[int], str]) -> Preview:
    """Return a row of `records.VALUE` as an object.

    Args:
        row: row of the table.
        text: returns a text by its number.
    """
    return Preview(
        numel=int(row["numel"]),
        looked_at=int(row["looked_at"]),
        low=float(row["low"]),
        high=float(row["high"]),
        mean=float(row["mean"]),
        nans=int(row["nans"]),
        infs=int(row["infs"]),
        first=first_values(row, text(int(row["dtype"]))),  # type: ignore[arg-type]
    )


def name_of(names: Sequence[str], code: int) -> str:
    """Return the name of a code, or the number itself if only a newer version knows the code."""
    return names[code] if code < len(names) else str(code)


def shapes_of(parsed: Any) -> tuple[tuple[int, ...], ...]:
    """Return parsed JSON of shapes as tuples."""
    return tuple(tuple(shape) for shape in parsed or ())


def group_of(text: str) -> dict[str, Any]:
    """Return the group that a text describes: "name", "title", "ranks"."""
    try:
        found = json.loads(text)
        return {"name": str(found["name"]), "title": str(found["title"]), "ranks": [int(one) for one in found["ranks"]]}
    except (ValueError, TypeError, KeyError):  # a text was lost, or there were too many texts
        return {"name": text, "title": text, "ranks": []}
