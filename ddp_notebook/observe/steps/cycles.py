"""Find the begin and end of the steps of a cell on one rank.

optimizer|  evaluation   checkpoint   |input|forward|backward|optimizer|input|forward ...
         |  belongs to no step        |        step i                  |   step i + 1
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from ddp_notebook.observe.tables.matching import Numbers, Times
from ddp_notebook.records.schema import SPANS, Rows

_OPTIMIZER, _CELL, _FORWARD, _EVALUATION, _CHECKPOINT = map(
    SPANS.index, ("optimizer", "cell", "forward", "evaluation", "checkpoint")
)
PAUSING = [_EVALUATION, _CHECKPOINT]
_LOADS = [SPANS.index(kind) for kind in ("input", "workers")]
_PASSES = [SPANS.index(kind) for kind in ("forward", "backward", "input gradient", "weight gradient")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycles:
    """The steps of one rank in one cell: step i lasts from `begins_ns[i]` to `ends_ns[i]`."""

    begins_ns: Times  # (n,)
    ends_ns: Times  # (n,)
    first: int  # the number of the first one; more than 0 where rows were dropped
    threads: Numbers  # that step: one, or several, such as a thread for each step


def cycles(spans: Rows) -> Cycles | None:
    """The steps of one rank in one cell. A step ends at the end of an optimizer span, and the next one begins there, or
    after the evaluation and the checkpoints that follow it.

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
        first = round((skipped + int(ending[0]) + 1) / turn)
        return Cycles(begins_ns=_begins(spans, ends, threads)[1:], ends_ns=ends[1:], first=first, threads=threads)
    begin = spans["start_ns"][np.isin(spans["thread"], threads)].min()
    begins = _begins(spans, ends, threads)
    begins[0] = max(begin, begins[0])
    return Cycles(begins_ns=begins, ends_ns=ends, first=first, threads=threads)


class Pauses:
    """Finds where the next step begins after evaluation and checkpoints, which belong to no step.

    An evaluation is a forward without gradients of a model in eval mode that also trains in the cell. The next step
    begins with the first batch of the loader that its first forward or backward has its data from. Once a step has
    computed something, all belongs to it up to its end.

    Spans have to be added in the order of their begins.
    """

    def __init__(self) -> None:
        self._trained: set[int] = set()  # models that have trained in the cell
        self.is_open = False  # there was a pause since the last step
        self._begins_ns = -1  # begin of the next step; -1: not known yet
        self._loads: list[tuple[int, int]] = []  # loads since the pause: name of the loader, begin of the load
        self._ends_ns = -1
        self._computes = False  # the current step has begun to compute

    def add(self, kind: int, name: int, start_ns: int, end_ns: int) -> None:
        """Add a span."""
        is_pause = kind == _CHECKPOINT or (kind == _EVALUATION and name in self._trained)
        if kind == _FORWARD:
            self._trained.add(name)
        if is_pause and not self._computes:
            self.is_open, self._ends_ns = True, max(end_ns, self._ends_ns)
            self._loads.clear()
        elif kind in _LOADS and self.is_open:
            self._loads.append((name, start_ns))
        elif kind in _PASSES and not self._computes:
            self._computes = True
            if self.is_open:
                loader = self._loads[-1][0] if self._loads else None
                own = [since_ns for name, since_ns in self._loads if name == loader]
                self._begins_ns = max(self._ends_ns, min([start_ns, *own]))

    def end_step(self, begin_ns: int) -> int:
        """End a step, and return its begin.

        Args:
            begin_ns: the end of the step before it.
        """
        begins_ns = begin_ns
        if self.is_open:
            begins_ns = max(begin_ns, self._begins_ns if self._begins_ns >= 0 else self._ends_ns)
        self.is_open, self._begins_ns, self._ends_ns, self._computes = False, -1, -1, False
        self._loads.clear()
        return begins_ns


def _begins(spans: Rows, ends: Times, threads: Numbers) -> Times:
    """Return the begins (n,) of the steps with these ends. The first begin is at least -1."""
    begins = np.concatenate(([-1], ends[:-1]))
    if not np.isin(spans["kind"], PAUSING).any():
        return begins
    own = spans[np.isin(spans["thread"], threads)]
    own = own[np.argsort(own["start_ns"], kind="stable")]
    pauses, at, until = Pauses(), 0, ends.tolist()
    for kind, name, start_ns, end_ns in own[["kind", "name", "start_ns", "end_ns"]].tolist():
        while at < len(until) and start_ns >= until[at]:
            begins[at] = min(pauses.end_step(int(begins[at])), until[at])
            at += 1
        pauses.add(kind, name, start_ns, end_ns)
    for rest in range(at, len(until)):
        begins[rest] = min(pauses.end_step(int(begins[rest])), until[rest])
    return begins


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
