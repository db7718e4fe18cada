"""Buckets that took the short way, and their rows: made many at once, since in a fast loop most rows are of such."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np

from ddp_notebook.rank.group.kernels.repeats import Repeat
from ddp_notebook.rank.record.training.buckets import Backward
from ddp_notebook.records.schema import CALL


def rows_of(records: Iterable[Any]) -> int:
    """How many rows they make."""
    return sum(record.has_span + len(record.again) if type(record) is Backward else 1 for record in records)


def pack(backwards: Sequence[Backward], rank: int, constants: Callable[[Repeat, Backward], bytes]) -> bytes:
    """The rows of `records.CALL` of those of their calls that took the short way.

    Args:
        backwards: that are over.
        rank: this one.
        constants: makes a row of what is the same each time.
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
            # A thread of gloo's may get the GIL to note the end only after the backward has gone on.
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
