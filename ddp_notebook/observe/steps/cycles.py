"""Find the begin and end of the steps of a cell on one rank.

optimizer|  evaluation   checkpoint   |input|forward|backward|optimizer|input|forward ...
         |  belongs to no step        |        step i                  |   step i + 1
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ddp_notebook.observe.tables.matching import Numbers, Times
from ddp_notebook.observe.tables.ring_buffer import select
from ddp_notebook.records.schema import SPANS, Rows

_OPTIMIZER, _CELL, _FORWARD, _EVALUATION, _CHECKPOINT = map(
    SPANS.index, ("optimizer", "cell", "forward", "evaluation", "checkpoint")
)
_PAUSING = [_EVALUATION, _CHECKPOINT]
_LOADS = [SPANS.index(kind) for kind in ("input", "workers")]
_PASSES = [SPANS.index(kind) for kind in ("forward", "backward", "input gradient", "weight gradient")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycles:
    """Steps of one rank in one cell: step i lasts from `begins_ns[i]` to `ends_ns[i]`."""

    begins_ns: Times  # (n,)
    ends_ns: Times  # (n,)
    first: int  # number of the first one; above 0 if rows were dropped
    threads: Numbers  # threads that step: one, or several, for example a thread for each step


def cycles(spans: Rows) -> Cycles | None:
    """Find the steps of one rank in one cell.

    A step ends at the end of an optimizer span. The next step begins there, or after the evaluation and checkpoints
    that follow.

    If several optimizers of a thread alternate, as in a GAN, a step ends with the last optimizer of each cycle. Steps
    of several threads all count, whether the threads run one after the other or at the same time.

    Args:
        spans: (n,) rows of `records.SPAN`, of one rank and cell.

    Returns:
        None if no step has ended.
    """
    spans = select(spans, (spans["end_ns"] >= 0) & (spans["kind"] != _CELL))
    optimizers = outermost(select(spans, spans["kind"] == _OPTIMIZER))
    if not len(optimizers):
        return None
    threads, ending = np.unique(optimizers["thread"]), _ending(optimizers)
    ends = optimizers["end_ns"][ending]
    first, skipped = 0, int(optimizers["step"][0])
    if skipped:  # the rows of the first steps were dropped: begin after the first known end
        turn = len(optimizers) / len(ending)
        first = round((skipped + int(ending[0]) + 1) / turn)
        return Cycles(begins_ns=_begins(spans, ends, threads)[1:], ends_ns=ends[1:], first=first, threads=threads)
    begin = spans["start_ns"][of_threads(spans, threads)].min()
    begins = _begins(spans, ends, threads)
    begins[0] = max(begin, begins[0])
    return Cycles(begins_ns=begins, ends_ns=ends, first=first, threads=threads)


class _Pass(NamedTuple):
    """A forward pass that may belong to an evaluation."""

    kind: int
    name: int
    start_ns: int
    end_ns: int
    is_training: bool


class Pauses:
    """Finds the begin of the next step after evaluation and checkpoints, which belong to no step.

    A step starts to compute with its first forward pass with gradients in training mode, or with the forward passes in
    eval mode before its first backward pass. After that, everything up to its end belongs to the step. Earlier forward
    passes are an evaluation in these cases:

    - the model also trains in the cell, and was in eval mode and computed no gradients;
    - a batch is loaded between the forward pass and the step;
    - the model is that of the step, and no batch is loaded between two steps.

    Otherwise the forward pass belongs to the step, for example that of a teacher model. This includes a model that does
    not train and has a forward pass in each step. The next step begins with the first batch of the DataLoader that
    feeds its first forward or backward pass. A loader that feeds neither this step nor the previous one belongs to an
    evaluation with unrecorded forward passes, of a model outside DDP and FSDP.

    Spans must be added in the order of their begin.
    """

    def __init__(self) -> None:
        self._trained: set[int] = set()  # models that have trained in the cell
        self._is_first = True  # the current step is the first one of the cell
        self._companions: set[int] = set()  # models that do not train, with a forward pass in the last step
        self._fed: set[int] = set()  # loaders of the last step
        self._forget()

    def _forget(self) -> None:
        """Start a new step."""
        self._passes: list[_Pass] = []  # passes before the step computes
        self._loads: list[tuple[int, int]] = []  # name of the loader, begin of the load
        self._until_ns = -1  # end of the last pause; -1: there was none
        self._begins_ns = -1  # begin of the step; -1: the end of the last one
        self._computes = False
        self._others: set[int] = set()  # models that do not train, with a forward pass in this step
        self._feeds: set[int] = set()  # loaders of this step

    def add(self, kind: int, name: int, start_ns: int, end_ns: int, is_training: bool) -> None:
        """Add a span."""
        if kind in _LOADS:
            self._feeds.add(name)
            if not self._computes:
                self._loads.append((name, start_ns))
        elif self._computes:
            if kind == _FORWARD:
                self._trained.add(name)
            elif kind == _EVALUATION:
                self._others.add(name)
        elif kind == _CHECKPOINT:
            self._until_ns = max(end_ns, self._until_ns)
        elif kind == _EVALUATION or (kind == _FORWARD and not is_training):
            self._passes.append(_Pass(kind, name, start_ns, end_ns, is_training))
        elif kind == _FORWARD:
            self._begin({name}, start_ns)
        elif kind in _PASSES:
            own = [one for one in self._passes if one.kind == _FORWARD]
            self._passes = [one for one in self._passes if one.kind != _FORWARD]
            self._begin({one.name for one in own}, min([start_ns, *(one.start_ns for one in own)]))

    def end_step(self, begin_ns: int) -> int:
        """End a step, and return its begin.

        Args:
            begin_ns: end of the previous step.
        """
        if not self._computes:
            ends = [one.end_ns for one in self._passes if self._evaluates(one, self._trained)]
            self._begins_ns = max([self._until_ns, *ends])
        begins_ns = max(begin_ns, self._begins_ns)
        self._is_first, self._companions, self._fed = False, self._others - self._trained, self._feeds
        self._forget()
        return begins_ns

    def _begin(self, models: set[int], start_ns: int) -> None:
        """Start to compute.

        Args:
            models: models of the first forward passes of the step.
            start_ns: begin of the first forward pass.
        """
        self._computes = True
        self._trained |= models
        if not self._passes and self._until_ns < 0 and len({name for name, _ in self._loads}) < 2:
            return
        belongs, evaluating = [start_ns], set()
        for one in self._passes:
            loader = next((name for name, since_ns in reversed(self._loads) if since_ns <= one.start_ns), None)
            if self._is_evaluation(one, models) or (loader in evaluating and one.name in self._trained):
                self._until_ns = max(one.end_ns, self._until_ns)
                evaluating |= {loader} - {None}
            else:
                belongs.append(one.start_ns)
            self._others.add(one.name)
        if (others_ns := self._begin_of_others()) >= 0:
            self._until_ns = max(self._until_ns, others_ns)
        if self._until_ns >= 0:
            later = [(name, since_ns) for name, since_ns in self._loads if since_ns >= self._until_ns]
            belongs += [since_ns for name, since_ns in later if name == later[-1][0]]
            self._begins_ns = min((ns for ns in belongs if ns >= self._until_ns), default=self._until_ns)

    def _evaluates(self, one: _Pass, models: set[int]) -> bool:
        """Return whether this is certainly an evaluation of one of these models."""
        return one.kind == _EVALUATION and not one.is_training and one.name in models

    def _is_evaluation(self, one: _Pass, models: set[int]) -> bool:
        if self._evaluates(one, self._trained):
            return True
        if not self._loads:
            return one.name in models
        if one.name not in self._trained and (self._is_first or one.name in self._companions):
            return False
        return self._loads[-1][1] > one.start_ns

    def _begin_of_others(self) -> int:
        """Return the begin of the step's first load after loads of a loader that does not feed steps; -1 without such a
        loader.
        """
        if self._is_first or not self._loads:
            return -1
        own = self._loads[-1][0]
        others = [since_ns for name, since_ns in self._loads if name != own and name not in self._fed]
        if not others:
            return -1
        return min(since_ns for name, since_ns in self._loads if name == own and since_ns >= others[-1])


def of_threads(rows: Rows, threads: Numbers) -> npt.NDArray[np.bool_]:
    """Return a mask (n,) of the rows of these threads. One thread is the usual case, and fast."""
    return rows["thread"] == threads[0] if len(threads) == 1 else np.isin(rows["thread"], threads)


def _begins(spans: Rows, ends: Times, threads: Numbers) -> Times:
    """Return the begins (n,) of the steps with these ends. The first begin is at least -1."""
    begins = np.concatenate(([-1], ends[:-1]))
    if not _may_pause(spans):
        return begins
    own = select(spans, of_threads(spans, threads))
    own = select(own, np.argsort(own["start_ns"], kind="stable"))
    pauses, at, until = Pauses(), 0, ends.tolist()
    columns = (own[name].tolist() for name in ("kind", "name", "start_ns", "end_ns", "is_training"))
    for kind, name, start_ns, end_ns, is_training in zip(*columns, strict=True):
        while at < len(until) and start_ns >= until[at]:
            begins[at] = min(pauses.end_step(int(begins[at])), until[at])
            at += 1
        pauses.add(kind, name, start_ns, end_ns, is_training)
    for rest in range(at, len(until)):
        begins[rest] = min(pauses.end_step(int(begins[rest])), until[rest])
    return begins


def _may_pause(spans: Rows) -> bool:
    """Return whether there may be an evaluation or a checkpoint between two steps."""
    if np.isin(spans["kind"], _PAUSING).any():
        return True
    modes = spans["is_training"][spans["kind"] == _FORWARD]
    loaders = spans["name"][np.isin(spans["kind"], _LOADS)]
    return bool((modes != modes[:1]).any() or (loaders != loaders[:1]).any())


def outermost(spans: Rows) -> Rows:
    """Return the spans that are inside no other span of their thread, ordered by their end.

    An optimizer that wraps another one counts once.
    """
    spans = select(spans, np.lexsort((-spans["end_ns"], spans["start_ns"], spans["thread"])))
    is_outer = np.ones(len(spans), bool)
    begins = np.unique(spans["thread"], return_index=True)[1].tolist()
    for begin, end in itertools.pairwise([*begins, len(spans)]):
        own = spans[begin:end]
        is_outer[begin + 1 : end] = own["end_ns"][1:] > np.maximum.accumulate(own["end_ns"])[:-1]
    found = select(spans, is_outer)
    return select(found, np.argsort(found["end_ns"], kind="stable"))


def _ending(optimizers: Rows) -> Numbers:
    """Return the indexes of the optimizer spans that end a step. Each thread has its own cycles."""
    of_threads = [np.flatnonzero(optimizers["thread"] == thread) for thread in np.unique(optimizers["thread"])]
    return np.sort(np.concatenate([own[_endings(optimizers["name"][own].tolist())] for own in of_threads]))


def _endings(names: list[int]) -> list[int]:
    """Return the indexes of the optimizer spans of a thread that end a step.

    The optimizer that joins last ends a cycle. If it joins much later than the others, or stops, it only ends the
    cycles in which it takes part.

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
    before = int(places[0]) - turn + 1  # begin of the cycle with its first step
    if before > 2 * turn:
        ending = _endings(names[:before]) + ending
    behind = int(places[-1]) + 1
    if len(names) - behind > 2 * turn:
        ending += [behind + place for place in _endings(names[behind:])]
    return ending
