"""Rows of fast-path buckets. They are made together, since most rows of a fast training loop are of this kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np

from ddp_notebook.rank.group.kernels.repeats import Repeat
from ddp_notebook.rank.record.training.buckets import Backward
from ddp_notebook.records.schema import CALL
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401


def rows_of(records: Iterable[Any]) -> int:
    """Return the number of rows of these records."""
    return sum(record.has_span + len(record.again) if type(record) is Backward else 1 for record in records)


def pack(backwards: Sequence[Backward], rank: int, constants: Callable[[Repeat, Backward], bytes]) -> bytes:
    """Return the rows of `records.CALL` of the fast-path calls of some backwards.

    Args:
        backwards: backwards that have ended.
        rank: number of this rank.
        constants: makes the constant part of a row.
    """
    calls: list[int] = []
    rows, numbers, times, ends, moments = [], [], [], [], []
    for backward in backwards:
        moment, last_ns, again = backward.moment, backward.end_ns, backward.again
        assert moment is not None and backward.serials is not None
        for repeat, number, since_ns, kept in again:
            if repeat.row is None:
                repeat.row = constants(repeat, backward)
            rows.append(repeat.row)
            numbers.append(number)
            times.append(since_ns)
            # A gloo thread may get the GIL, to note the end, only after the backward has continued.
            ends.append(min(kept[1], last_ns) if len(kept) > 1 else last_ns)
        calls += islice(backward.serials, len(again))
        moments.append((backward.number, moment.cell, moment.step))
    counts = [len(backward.again) for backward in backwards]
    table = np.frombuffer(bytearray(b"".join(rows)), CALL)
    table["rank"], table["call"], table["number"], table["end_ns"] = rank, calls, numbers, ends
    table["issue_ns"] = table["start_ns"] = times
    for name, values in zip(("backward", "cell", "step"), np.array(moments).T, strict=True):
        table[name] = np.repeat(values, counts)
    return table.tobytes()
