"""Buckets that took the short way, and their rows: made many at once, since in a fast loop most rows are of such."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ddp_notebook.rank.group.kernels.repeats import Again, Repeat
from ddp_notebook.records.schema import CALL

if TYPE_CHECKING:
    from ddp_notebook.rank.record.tape import Moment


class Repeated(NamedTuple):
    """The buckets of a backward that took the short way."""

    moment: Moment
    serials: Iterator[int]  # the rank's count of calls: they are counted when rows are made of them
    again: list[Again]


def rows_of(records: Iterable[Any]) -> int:
    """How many rows they make."""
    return sum(len(record.again) if type(record) is Repeated else 1 for record in records)


def pack(records: Sequence[Repeated], rank: int, constants: Callable[[Repeat, Moment], bytes]) -> bytes:
    """Their rows of `records.CALL`.

    Args:
        rank: this one.
        constants: makes a row of what is the same each time.
    """
    calls: list[int] = []
    rows, numbers, times, ends, moments = [], [], [], [], []
    for moment, serials, again in records:
        assert moment.backward is not None
        last_ns = moment.backward.end_ns
        for repeat, number, since_ns, its_ends in again:
            if repeat.row is None:
                repeat.row = constants(repeat, moment)
            rows.append(repeat.row)
            numbers.append(number)
            times.append(since_ns)
            # A thread of gloo's may get the GIL to note the end only after the backward has gone on.
            ends.append(min(its_ends[0], last_ns) if its_ends else last_ns)
        calls += islice(serials, len(again))
        moments.append((moment.backward.number, moment.cell, moment.step))
    counts = [len(record.again) for record in records]
    table = np.frombuffer(bytearray(b"".join(rows)), CALL)
    table["rank"], table["call"], table["number"], table["end_ns"] = rank, calls, numbers, ends
    table["issue_ns"] = table["start_ns"] = times
    for name, values in zip(("backward", "cell", "step"), np.array(moments).T, strict=True):
        table[name] = np.repeat(values, counts)
    return table.tobytes()
