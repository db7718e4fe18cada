"""Where the steps of a cell begin and end on one rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ddp_notebook.observe.matching import Times
from ddp_notebook.records import SPANS, Rows

_OPTIMIZER, _CELL = SPANS.index("optimizer"), SPANS.index("cell")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycles:
    """The steps of one rank in one cell: step i lasts from `bounds_ns[i]` to `bounds_ns[i + 1]`."""

    bounds_ns: Times  # (n + 1,)
    first: int  # the number of the first one; more than 0 where rows were dropped
    thread: int  # of the optimizer


def cycles(spans: Rows) -> Cycles | None:
    """The steps of one rank in one cell. A step ends at the end of an optimizer span, and the next one begins there.

    Where several optimizers take turns, as in a GAN, it ends with the one that ends their turn.

    Args:
        spans: (n,) rows of `records.SPAN`, of one rank and cell.

    Returns:
        None where no step has ended.
    """
    spans = spans[(spans["end_ns"] >= 0) & (spans["kind"] != _CELL)]
    optimizers = outermost(spans[spans["kind"] == _OPTIMIZER])
    if not len(optimizers):
        return None
    threads, counts = np.unique(optimizers["thread"], return_counts=True)
    thread = int(threads[counts.argmax()])
    optimizers = optimizers[optimizers["thread"] == thread]
    ending = np.array(_endings(optimizers["name"].tolist()), np.int64)
    ends = np.sort(optimizers["end_ns"][ending])
    first, skipped = 0, int(optimizers["step"][0])
    if skipped:  # the rows of the first steps were dropped: begin behind the first end that is left
        turn = len(optimizers) / len(ending)
        return Cycles(bounds_ns=ends, first=round((skipped + ending[0] + 1) / turn), thread=thread)
    begin = spans["start_ns"][spans["thread"] == thread].min()
    return Cycles(bounds_ns=np.concatenate(([begin], ends)), first=first, thread=thread)


def outermost(spans: Rows) -> Rows:
    """Those that lie in no other: an optimizer around another one steps once."""
    spans = spans[np.lexsort((-spans["end_ns"], spans["start_ns"]))]
    ended = np.maximum.accumulate(spans["end_ns"]) if len(spans) else spans["end_ns"]
    is_outer = np.ones(len(spans), bool)
    is_outer[1:] = spans["end_ns"][1:] > ended[:-1]
    return spans[is_outer]


def _endings(names: list[int]) -> list[int]:
    """Which of the optimizer spans end a step.

    The one that joins last ends the turn. One that joins much later, or stops, ends the turns that it takes part in.

    Example:
        >>> _endings([7, 8, 7, 8]), _endings([7, 7, 8, 7, 7, 8])
        ([1, 3], [2, 5])
        >>> _endings([7, 7, 7, 7, 7, 7, 7, 8, 7, 8])
        [0, 1, 2, 3, 4, 5, 7, 9]
    """
    joined = list(dict.fromkeys(names))
    if len(joined) == 1:
        return list(range(len(names)))
    places = np.flatnonzero(np.array(names) == joined[-1])
    turn = int(np.median(np.diff(places))) if len(places) > 1 else len(joined)
    ending = places.tolist()
    before = int(places[0]) - turn + 1  # the turn of its first step begins here
    if before > 2 * turn:
        ending = _endings(names[:before]) + ending
    behind = int(places[-1]) + 1
    if len(names) - behind > 2 * turn:
        ending += [behind + place for place in _endings(names[behind:])]
    return ending
