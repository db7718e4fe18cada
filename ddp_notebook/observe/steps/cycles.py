"""Where the steps of a cell begin and end on one rank."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from ddp_notebook.observe.tables.matching import Numbers, Times
from ddp_notebook.records.schema import SPANS, Rows

_OPTIMIZER, _CELL = SPANS.index("optimizer"), SPANS.index("cell")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycles:
    """The steps of one rank in one cell: step i lasts from `bounds_ns[i]` to `bounds_ns[i + 1]`."""

    bounds_ns: Times  # (n + 1,)
    first: int  # the number of the first one; more than 0 where rows were dropped
    threads: Numbers  # that step: one, or several, such as a thread for each step


def cycles(spans: Rows) -> Cycles | None:
    """The steps of one rank in one cell. A step ends at the end of an optimizer span, and the next one begins there.

    Where several optimizers of a thread take turns, as in a GAN, it ends with the one that ends their turn. Steps of
    several threads all count, whether the threads follow each other or step at the same time.

    Args:
        spans: (n,) rows of `records.SPAN`, of one rank and cell.

    Returns:
        None where no step has ended.
    """
    spans = spans[(spans["end_ns"] >= 0) & (spans["kind"] != _CELL)]
    optimizers = outermost(spans[spans["kind"] == _OPTIMIZER])
    if not len(optimizers):
        return None
    threads, ending = np.unique(optimizers["thread"]), _ending(optimizers)
    ends = optimizers["end_ns"][ending]
    first, skipped = 0, int(optimizers["step"][0])
    if skipped:  # the rows of the first steps were dropped: begin behind the first end that is left
        turn = len(optimizers) / len(ending)
        return Cycles(bounds_ns=ends, first=round((skipped + int(ending[0]) + 1) / turn), threads=threads)
    begin = spans["start_ns"][np.isin(spans["thread"], threads)].min()
    return Cycles(bounds_ns=np.concatenate(([begin], ends)), first=first, threads=threads)


def outermost(spans: Rows) -> Rows:
    """Those that lie in no other of their thread, by their ends: an optimizer around another one steps once."""
    spans = spans[np.lexsort((-spans["end_ns"], spans["start_ns"], spans["thread"]))]
    is_outer = np.ones(len(spans), bool)
    begins = np.unique(spans["thread"], return_index=True)[1].tolist()
    for begin, end in itertools.pairwise([*begins, len(spans)]):
        own = spans[begin:end]
        is_outer[begin + 1 : end] = own["end_ns"][1:] > np.maximum.accumulate(own["end_ns"])[:-1]
    found = spans[is_outer]
    return found[np.argsort(found["end_ns"], kind="stable")]


def _ending(optimizers: Rows) -> Numbers:
    """Which of the optimizer spans end a step, by index. Turns are taken in a thread."""
    of_threads = [np.flatnonzero(optimizers["thread"] == thread) for thread in np.unique(optimizers["thread"])]
    return np.sort(np.concatenate([own[_endings(optimizers["name"][own].tolist())] for own in of_threads]))


def _endings(names: list[int]) -> list[int]:
    """Which of the optimizer spans of a thread end a step.

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
