"""Changes of step times between two training runs, by rank and part of a step, and the cause of the largest change.

A change counts if it exceeds the noise. The noise is measured: it is how much the same quantity varies within each of
the two runs, between their halves and between blocks of consecutive steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ddp_notebook.observe.compare.sides import Side, block_of, variation
from ddp_notebook.observe.report.cores import lacks
from ddp_notebook.observe.steps.steps import StepTable
from ddp_notebook.observe.steps.waits import straggler_of
from ddp_notebook.records.units import ms
from ddp_notebook.records.words import list_ranks

_COLUMNS = {  # part of a step -> column of a `StepTable`; "remote calls" is the rest of its compute
    "input": "input",
    "forward": "own_forward",
    "backward": "own_backward",
    "optimizer": "optimizer",
    "exposed": "exposed",
    "waiting": "waiting",
    "rest": "rest",
}
PARTS = (*_COLUMNS, "remote calls")
_LEAST_SHARE = 0.03  # smallest change that counts, as a share of a step
_LEAST_NS = 100_000.0
_SAME = 0.7  # ranks with at least this share of the largest change are named together
_EXPLAINS = 0.3  # share of a step's change that its cause must explain
_WORDS = {  # owner, time in B, time in A
    "input": "the input of {owner} takes {after} instead of {before}",
    "optimizer": "the optimizer of {owner} takes {after} instead of {before}",
    "forward": "the forward of {owner} takes {after} instead of {before}",
    "backward": "the backward of {owner} takes {after} instead of {before}",
    "exposed": "communication that no computation overlaps takes {after} instead of {before} on {owner}",
    "waiting": "{owner} {wait} {after} instead of {before} for other ranks",
    "rest": "the time between the phases of {owner} is {after} instead of {before}",
    "remote calls": "the remote calls that {owner} {execute} take {after} instead of {before}",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PartChange:
    """Mean time of one part of a step in both runs."""

    rank: int
    part: str  # one of `PARTS`
    before_ns: float
    after_ns: float
    noise_ns: float  # infinite if there are too few steps to measure it

    @property
    def change_ns(self) -> float:
        return self.after_ns - self.before_ns

    @property
    def is_found(self) -> bool:
        """Return whether the change exceeds the noise."""
        return abs(self.change_ns) > self.noise_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeChange:
    """Step times of two training runs."""

    before_ns: float  # ms/step as shown everywhere, see `steps.run`
    after_ns: float
    noise_ns: float
    parts: tuple[PartChange, ...]  # only ranks that both runs have; the largest change first
    cause: str  # clause after "because"; "" if no part explains the change
    explained_ns: float  # time that the cause explains
    notes: tuple[str, ...]  # sentences

    @property
    def change_ns(self) -> float:
        return self.after_ns - self.before_ns

    @property
    def share(self) -> float:
        """Return the change relative to the first run: 0.1 is 10 % slower."""
        return self.change_ns / self.before_ns if self.before_ns else 0.0

    @property
    def is_found(self) -> bool:
        return abs(self.change_ns) > self.noise_ns

    @property
    def found(self) -> tuple[PartChange, ...]:
        """Return the parts whose changes exceed the noise."""
        return tuple(one for one in self.parts if one.is_found)

    @property
    def sentence(self) -> str:
        """Return the change as one sentence, without its full stop."""
        times = f"A: {ms(self.before_ns)}, B: {ms(self.after_ns)}"
        if not self.is_found:
            if not np.isfinite(self.noise_ns):
                return f"too few steps to tell a change of the step time from noise ({times})"
            return f"no change of the step time ({times}): changes up to {ms(self.noise_ns)} are noise here"
        word = "slower" if self.change_ns > 0 else "faster"
        text = f"B is {ms(abs(self.change_ns))} {word} than A per step ({times}, {self.share:+.0%})".replace(
            "%)", " %)"
        )
        if not self.cause:
            return f"{text}; no single part of a step explains it"
        if self.explained_ns >= 0.95 * abs(self.change_ns):
            return f"{text}, because {self.cause}"
        return f"{text}, {ms(self.explained_ns)} of it because {self.cause}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """Means of one side: R ranks, P parts of a step."""

    ranks: list[int]
    means: npt.NDArray[np.float64]  # (R, P)
    varies: npt.NDArray[np.float64]  # (R, P)
    step_varies: float


def _measure(steps: StepTable) -> _Measured:
    ranks, numbers = np.unique(steps.rank), np.unique(steps.number)
    block, count = block_of(numbers)
    row = np.searchsorted(ranks, steps.rank)
    at = row * count + block[np.searchsorted(numbers, steps.number)]
    size = len(ranks) * count
    occurs = np.bincount(at, minlength=size)
    of_rank = np.bincount(row, minlength=len(ranks))
    columns = [steps.parts[name] for name in _COLUMNS.values()]
    columns.append(steps.parts["compute"] - steps.parts["own_forward"] - steps.parts["own_backward"])
    columns.append(steps.duration_ns)
    means, blocks = [], []
    with np.errstate(invalid="ignore", divide="ignore"):
        for column in columns:
            means.append(np.bincount(row, column, len(ranks)) / of_rank)
            blocks.append((np.bincount(at, column, size) / occurs).reshape(len(ranks), count))
    by_block = np.array(blocks)  # (P + 1, R, k)
    return _Measured(
        ranks=[int(rank) for rank in ranks],
        means=np.array(means[:-1]).T,
        varies=variation(by_block[:-1]).T,
        step_varies=float(variation(by_block[-1].mean(0))),
    )


def times(a: Side, b: Side) -> TimeChange:
    """Compare the step times of two runs.

    Args:
        a: the run before the change.
        b: the run after it.
    """
    before, after = _measure(a.kept), _measure(b.kept)
    by_load, notes = _load(a, b)
    least = max(_LEAST_SHARE * min(a.run.step_ns, b.run.step_ns), _LEAST_NS) + by_load
    is_thin = a.is_thin or b.is_thin
    noise = np.inf if is_thin else least + before.step_varies + after.step_varies
    found = []
    for rank in sorted(set(before.ranks) & set(after.ranks)):
        at, to = before.ranks.index(rank), after.ranks.index(rank)
        for number, part in enumerate(PARTS):
            found.append(
                PartChange(
                    rank=rank,
                    part=part,
                    before_ns=float(before.means[at, number]),
                    after_ns=float(after.means[to, number]),
                    noise_ns=np.inf if is_thin else float(least + before.varies[at, number] + after.varies[to, number]),
                )
            )
    found.sort(key=lambda one: -abs(one.change_ns))
    change_ns = b.run.step_ns - a.run.step_ns
    cause, explained_ns = ("", 0.0)
    if abs(change_ns) > noise:
        cause, explained_ns = _cause(found, change_ns, _critical(b if change_ns > 0 else a), len(after.ranks))
    return TimeChange(
        before_ns=a.run.step_ns,
        after_ns=b.run.step_ns,
        noise_ns=float(noise),
        parts=tuple(found),
        cause=cause,
        explained_ns=explained_ns,
        notes=notes,
    )


def _critical(slower: Side) -> int:
    """Return the rank that determines the step time of the slower run: its straggler, or the rank that waits least."""
    straggler = straggler_of(slower.every, slower.rows.hosts)
    if straggler is not None:
        return straggler.rank
    steps = slower.kept
    waits = {rank: float(steps.parts["waiting"][steps.rank == rank].mean()) for rank in steps.ranks}
    return min(waits, key=lambda rank: waits[rank])


def _cause(parts: Sequence[PartChange], change_ns: float, critical: int, world_size: int) -> tuple[str, float]:
    """Return the clause about the part that changed most, and the time that it explains; ("", 0) if none does.

    The parts of a rank add up to its step. So the parts of the rank that the others wait for explain the step of all.

    Args:
        parts: the largest change first.
        critical: the rank that determines the step of the slower run.
    """
    sign = 1 if change_ns > 0 else -1
    own = [one for one in parts if one.rank == critical and sign * one.change_ns > 0 and one.is_found]
    if not own or abs(own[0].change_ns) < _EXPLAINS * abs(change_ns):
        return "", 0.0
    top = own[0]
    same = [
        one
        for one in parts
        if one.part == top.part and one.is_found and sign * one.change_ns >= _SAME * abs(top.change_ns)
    ]
    ranks = sorted(one.rank for one in same)
    if len(ranks) == world_size > 1:
        owner = "all ranks"
    else:
        owner = list_ranks(ranks)
    is_one = len(ranks) == 1
    words = _WORDS[top.part].format(
        owner=owner,
        wait="waits" if is_one else "wait",
        execute="executes" if is_one else "execute",
        after=ms(float(np.mean([one.after_ns for one in same]))),
        before=ms(float(np.mean([one.before_ns for one in same]))),
    )
    return words, min(abs(top.change_ns), abs(change_ns))


def _periods(steps: StepTable) -> dict[int, tuple[int, int, int]]:
    """Return the begin, the end and the number of each rank's steps."""
    found = {}
    for rank in steps.ranks:
        own = steps.rank == rank
        found[int(rank)] = int(steps.start_ns[own].min()), int(steps.end_ns[own].max()), int(own.sum())
    return found


def _load(a: Side, b: Side) -> tuple[float, tuple[str, ...]]:
    """Return the time per step that other programs on the machine explain, and notes about cores.

    Time without a free core is no change of the program if other processes used the cores.
    """
    first, second = lacks(a.recording, _periods(a.every)), lacks(b.recording, _periods(b.every))
    if first is None or second is None:
        return 0.0, ()
    both = sorted(set(first[0]) & set(second[0]))
    if not both:
        return 0.0, ()
    rank = max(both, key=lambda one: abs(second[0][one] - first[0][one]))
    before, after = min(first[0][rank], a.run.step_ns), min(second[0][rank], b.run.step_ns)
    slower = second[1] if after > before else first[1]
    if abs(after - before) < max(_LEAST_SHARE * min(a.run.step_ns, b.run.step_ns), _LEAST_NS):
        return 0.0, ()
    cause = ""  # unknown
    if slower.by_others:
        cause = ": other processes used the cores"
    elif slower.by_ranks:
        cause = ": the ranks themselves used all cores"
    by_load = abs(after - before) if slower.by_others else 0.0
    if (after > before) != (b.run.step_ns > a.run.step_ns):
        return by_load, ()  # it does not explain the change
    note = f"Rank {rank} had no free core for up to {ms(after)} instead of {ms(before)} of a step{cause}"
    return by_load, (note,)
