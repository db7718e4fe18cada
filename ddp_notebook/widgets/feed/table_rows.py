"""Convert rows of a recording to rows of the tables in messages."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ddp_notebook.observe.tables.matching import RowSource, arrivals
from ddp_notebook.records.schema import FIRST_BYTES, SPANS, Rows, as_array
from ddp_notebook.widgets.feed.tables import FIRST, KINDS, empty

Times = npt.NDArray[np.int64]
_COLLECTIVE, _PIPELINE = map(KINDS.index, ("collective", "pipeline"))
_DRAWN_AS = {"workers": "input", "evaluation": "forward", "checkpoint": "block"}  # span kinds without their own bar
_KINDS = np.array([KINDS.index(kind) if (kind := _DRAWN_AS.get(one, one)) in KINDS else 0 for one in SPANS], np.uint8)
_FUTURE = SPANS.index("future")


def ms(times_ns: Any, start_ns: int) -> npt.NDArray[np.float64]:
    """Return (n,) milliseconds since the start; NaN if the time is not known."""
    return np.where(times_ns >= 0, (times_ns - start_ns) / 1e6, np.nan)


def metrics(rows: Rows, start_ns: int) -> Rows:
    """Convert rows of `records.METRIC`."""
    found = empty("metric", len(rows))
    for name in ("rank", "name", "cell", "step", "value"):
        found[name] = rows[name]
    found["time"] = ms(rows["time_ns"], start_ns)
    return found


def spans(rows: Rows, start_ns: int) -> Rows:
    """Convert rows of `records.SPAN`, without pipeline steps and waits for answers of remote calls.

    The duration of a pipeline step equals that of its actions. Waits for answers have separate bars.
    """
    rows = rows[(rows["kind"] != _PIPELINE) & (rows["kind"] != _FUTURE)]
    found = empty("span", len(rows))
    for name in ("rank", "name", "cell", "step", "thread"):
        found[name] = rows[name]
    found["kind"] = _KINDS[rows["kind"]]
    found["start"], found["end"] = ms(rows["start_ns"], start_ns), ms(rows["end_ns"], start_ns)
    found["wait"], found["peer"] = np.nan, -1
    return found


def calls(recording: RowSource, rows: Rows, waited_ns: npt.NDArray[Any], start_ns: int) -> Rows:
    """Convert rows of `records.CALL`.

    Args:
        waited_ns: (n,) Time each call waited for the last rank; negative if not known.
    """
    found = empty("span", len(rows))
    for name in ("rank", "cell", "step", "thread", "op", "group", "number", "call", "origin", "site"):
        found[name] = rows[name]
    found["state"], found["left_out"] = rows["state"], rows["left_out"]
    found["name"], found["peer"] = rows["module"], -1
    found["kind"] = _kinds(recording, rows["op"])
    found["nbytes"] = np.maximum(rows["nbytes_in"], rows["nbytes_out"])
    begun, ended = arrivals(rows), rows["end_ns"]
    # gloo does not report the end of a receive, only how long the caller waited for it.
    ended = np.where((ended < 0) & (rows["blocked_ns"] > 0), begun + rows["blocked_ns"], ended)
    found["start"], found["end"] = ms(begun, start_ns), ms(ended, start_ns)
    found["wait"] = np.where(waited_ns >= 0, waited_ns / 1e6, np.nan)
    return found


def values(recording: RowSource, rows: Rows, of_calls: Rows) -> Rows:
    """Convert rows of `records.VALUE`.

    Args:
        of_calls: (n,) Row of `records.CALL` for each value.
    """
    found = empty("value", len(rows))
    for name in ("rank", "call", "side", "dtype", "numel", "looked_at", "low", "high", "mean", "nans", "infs"):
        found[name] = rows[name]
    for name in ("cell", "group", "number", "op"):
        found[name] = of_calls[name]
    found["kind"] = _kinds(recording, of_calls["op"])
    found["shape"] = of_calls["shapes"]
    for number in np.unique(rows["dtype"]).tolist():
        mine = rows["dtype"] == number
        first = _first(rows[mine], recording.text(number))  # (m, up to 32)
        found["first"][mine, : first.shape[1]] = first
        found["count"][mine] = np.minimum(rows["first_count"][mine], first.shape[1])
    return found


def _kinds(recording: RowSource, ops: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Return (n,) kinds: collective, send or recv."""
    found = np.full(len(ops), _COLLECTIVE, np.uint8)
    for number in np.unique(ops).tolist():
        if (op := recording.text(number)) in KINDS:
            found[ops == number] = KINDS.index(op)
    return found


def _first(rows: Rows, dtype: str) -> npt.NDArray[np.float32]:
    """Return (n, up to 32) the first elements of tensors of one dtype; the modulus of complex values."""
    data = np.frombuffer(np.ascontiguousarray(rows["first"]).tobytes(), np.uint8).reshape(len(rows), FIRST_BYTES)
    found = as_floats(data[:, :FIRST_BYTES].tobytes(), dtype).reshape(len(rows), -1)
    return found[:, :FIRST]


def as_floats(data: bytes, dtype: str) -> npt.NDArray[np.float32]:
    """Return the elements of a torch tensor from its bytes, rounded to float32; the modulus of complex values."""
    found = as_array(data, dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        return (np.abs(found) if np.iscomplexobj(found) else found).astype("<f4")
