"""Arrival times of each rank at each collective, the waits of the others, and detection of a straggler.

    rank 0   arrives |~~~~~~~~~ waits ~~~~~~~~~|== transfer ==|
    rank 1        arrives |~~~~~~ waits ~~~~~~~|== transfer ==|
    rank 2                             arrives |== transfer ==|      the last one: it waits least

An all-reduce makes all steps equally long, on the slow rank and on the ranks that wait for it. The slow rank is the one
that waits least.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from ddp_notebook.observe.steps.run import counted
from ddp_notebook.observe.steps.steps import StepTable, measure
from ddp_notebook.observe.tables.matching import RowSource, calls_of, match_collectives
from ddp_notebook.observe.views import WARM_UP, Straggler, Wait
from ddp_notebook.records.schema import ORIGINS
from ddp_notebook.records.units import ms
from ddp_notebook.records.words import rank_on

_FEWEST_STEPS = 5
_LEAST_SHARE = 0.6  # share of the steps in which it must have been the last
_CHANCE = 0.01  # probability that one of equally fast ranks is last this often
_LEAST_LOSS = 0.05  # share of a step
_LEAST_LOSS_NS = 1_000_000
_LEAST_TOTAL_NS = 200_000_000  # total over all steps: another program that uses the core for a moment also slows a rank
_NOISE = 3.0  # multiple of the scatter of the loss, its median absolute deviation

Times = npt.NDArray[np.int64]


def waits(recording: RowSource, cell: int | None = None, group: str | None = None) -> list[Wait]:
    """Return the collectives that at least two ranks have recorded, in order of time.

    Args:
        recording: the recorded tables.
        cell: number of a cell; None: all cells.
        group: name or title of a group; None: all groups.

    Example:
        >>> from tests.observe.synthetic import simulate
        >>> wait = waits(simulate(slow=2, phase="forward", extra_ms=50))[4]
        >>> wait.op, wait.last, (wait.waited_ns // 10**6).tolist()
        ('all_reduce', 2, [50, 50, 0, 50])
    """
    calls = calls_of(recording, cell)
    if group is not None:
        known = [(number, recording.group_of(int(number))) for number in np.unique(calls["group"])]
        calls = calls[np.isin(calls["group"], [n for n, one in known if group in (one["name"], one["title"])])]
    matched = match_collectives(recording, calls)
    rows = calls[matched.index]
    ranks = rows["rank"].tolist()
    last = rows[matched.last]
    # The message size of nccl-tests is the larger side of the rank with the most: the root of a gather.
    sizes = np.maximum(rows["nbytes_in"], rows["nbytes_out"])
    nbytes = np.maximum.reduceat(sizes, matched.first[:-1]).tolist() if len(matched) else []
    groups = {number: recording.group_of(number) for number in np.unique(last["group"]).tolist()}
    ops = {number: recording.text(number) for number in np.unique(last["op"]).tolist()}
    columns = [last[name].tolist() for name in ("group", "number", "op", "cell", "origin", "rank")]
    transfers = (matched.ended_ns - matched.all_arrived_ns).tolist()
    edges = matched.first.tolist()
    return [
        Wait(
            group=groups[its_group]["title"],
            group_name=groups[its_group]["name"],
            number=number,
            op=ops[op],
            nbytes=size,
            cell=its_cell,
            origin=ORIGINS[origin],
            ranks=tuple(ranks[begin:end]),
            arrived_ns=matched.arrived_ns[begin:end],
            waited_ns=matched.waited_ns[begin:end],
            transfer_ns=transfer,
            last=rank,
        )
        for its_group, number, op, its_cell, origin, rank, size, transfer, begin, end in zip(
            *columns, nbytes, transfers, edges[:-1], edges[1:], strict=True
        )
    ]


def straggler(recording: RowSource, cell: int | None = None) -> Straggler | None:
    """Return the rank that the others wait for, or None if the evidence is insufficient.

    A rank is reported if it waited least in most steps, more often than equally fast ranks would by chance. The loss of
    the others must exceed 5 % of a step, 1 ms, three times its scatter, and 200 ms over all steps. The phase is the one
    in which it took longer than the others, without its own waits. Stages of a pipeline are never reported, because
    they wait for its schedule.

    Args:
        recording: the recorded tables.
        cell: number of the cell; None: the last one with steps. If it has no optimizer steps, the blocking collectives
            of its busiest group are inspected.

    Example:
        >>> from tests.observe.synthetic import simulate
        >>> print(straggler(simulate(slow=2, phase="forward", extra_ms=50, noise_ms=3)).evidence)
        rank 2 came last in 18 of 18 steps, and the others waited 49.2 ms of each step for it (mean); its forward \
takes 61.1 ms, theirs 10.1 ms (medians)
        >>> straggler(simulate(noise_ms=3)) is None
        True
    """
    found = measure(recording, cell)
    if len(found):
        return straggler_of(found, recording.hosts)
    chosen = cell if cell is not None else int(recording.rows("call")["cell"].max(initial=0))
    rounds = _rounds_of_collectives(waits(recording, chosen))
    return None if rounds is None else _judge(rounds, recording.hosts)


def straggler_of(found: StepTable, hosts: Sequence[str] = ()) -> Straggler | None:
    """Return the straggler from measured steps; those of the last cell count.

    Args:
        hosts: machine of each rank; (): all ranks are on one machine.
    """
    found = found.of_cell(int(found.cell.max(initial=0)))
    if found.is_pipelined.any():  # the last stage waits least, and is not slow
        return None
    rounds = _rounds_of_steps(found)
    return None if rounds is None else _judge(rounds, hosts)


def cost_of(found: StepTable, rank: int) -> float:
    """Return the time per step in ns that the other ranks wait for a slow rank.

    This is the mean of the other ranks, each over the steps in the mean of the run. Waits for answers of remote calls
    do not count.

    Args:
        found: steps of one cell.
        rank: the slow rank.
    """
    typical = found.typical
    waited = typical.parts["waiting"] - typical.parts["answers"]
    means = [float(waited[typical.rank == other].mean()) for other in typical.ranks if other != rank]
    return sum(means) / len(means) if means else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rounds:
    """Meetings of R ranks: n steps or collectives."""

    unit: str  # "steps" or "collectives"
    ranks: tuple[int, ...]
    lasted_ns: Times  # (n,) duration
    waited_ns: Times  # (R, n) wait
    cost_of: Callable[[int], float]  # returns the mean time in ns per round that the others wait for this rank
    phases: dict[str, Times]  # (R, n) each, time of a rank without waits


def _rounds_of_steps(found: StepTable) -> _Rounds | None:
    """Return the steps that all ranks have, without the first ones.

    Waits for answers of remote calls do not count, because a server never waits, and is not slow.
    """
    ranks, every = found.ranks, found
    numbers, counts = np.unique(found.number[found.number >= WARM_UP], return_counts=True)
    common = numbers[counts == len(ranks)]
    if len(ranks) < 2 or not len(common):
        return None
    kept = np.isin(found.number, common)
    found = found[kept]
    order = np.lexsort((found.number, found.rank))

    def table(column: Times) -> Times:
        """Return a column by rank and step: (R, n)."""
        return column[order].reshape(len(ranks), len(common))

    parts = found.parts
    return _Rounds(
        unit="steps",
        ranks=tuple(ranks),
        lasted_ns=np.median(table(found.duration_ns), axis=0).astype(np.int64),
        waited_ns=table(parts["waiting"] - parts["answers"]),
        cost_of=partial(cost_of, every),
        phases={
            "input": table(parts["input"]),
            "forward": table(parts["own_forward"]),
            "backward": table(parts["own_backward"]),
            "optimizer": table(parts["optimizer"]),
            "between": table(parts["rest"]),
            "outside": table(_since_last_step_ns(every)[kept]),
        },
    )


def _since_last_step_ns(found: StepTable) -> Times:
    """Return the time from the end of the previous step of the same rank to each step; 0 for the first one."""
    order = np.lexsort((found.number, found.rank))
    rank, number = found.rank[order], found.number[order]
    follows = (np.diff(rank) == 0) & (np.diff(number) == 1)
    since = np.zeros(len(order), np.int64)
    since[order[1:]] = np.where(follows, np.maximum(found.start_ns[order][1:] - found.end_ns[order][:-1], 0), 0)
    return since


def _rounds_of_collectives(found: Sequence[Wait]) -> _Rounds | None:
    """Return the collectives of the busiest group. The time of a rank between two of them counts as one phase."""
    names = [wait.group_name for wait in found]
    if not names:
        return None
    busiest = max(dict.fromkeys(names), key=names.count)
    own = [wait for wait in found if wait.group_name == busiest]
    ranks = max((wait.ranks for wait in own), key=len)
    own = [wait for wait in own if wait.ranks == ranks]
    if len(own) <= WARM_UP + 1:
        return None
    arrived = np.array([wait.arrived_ns for wait in own]).T  # (R, n + 1)
    ended = np.array([int(wait.arrived_ns.max()) + wait.transfer_ns for wait in own])
    lasted, waited = np.diff(ended)[WARM_UP:], np.array([wait.waited_ns for wait in own]).T[:, 1 + WARM_UP :]
    typical = counted(np.arange(len(lasted)) + WARM_UP, lasted)[0] - WARM_UP
    return _Rounds(
        unit="collectives",
        ranks=ranks,
        lasted_ns=lasted,
        waited_ns=waited,
        cost_of=lambda rank: float(waited[np.array(ranks) != rank][:, typical].mean()),
        phases={"between": np.maximum(arrived[:, 1:] - ended[:-1], 0)[:, WARM_UP:]},
    )


def _judge(rounds: _Rounds, hosts: Sequence[str]) -> Straggler | None:
    waited, (world, count) = rounds.waited_ns, rounds.waited_ns.shape
    if count < _FEWEST_STEPS:
        return None
    least_two = np.sort(waited, axis=0)[:2]  # if these are equal, two ranks were last
    lasts = np.where(least_two[0] < least_two[1], waited.argmin(axis=0), -1)
    times_last = np.bincount(lasts[lasts >= 0], minlength=world)
    slow = int(times_last.argmax())
    share = times_last[slow] / count
    others = [at for at in range(world) if at != slow]
    lost = np.median(waited[others], axis=0) - waited[slow]  # (n,)
    typical = float(np.median(lost))
    noise = float(np.median(np.abs(lost - typical)))
    least = max(_LEAST_LOSS * float(np.median(rounds.lasted_ns)), _LEAST_LOSS_NS, _NOISE * noise)
    if typical < least or float(lost.sum()) < _LEAST_TOTAL_NS:
        return None
    if share < _LEAST_SHARE or _chance(int(times_last[slow]), count, world) > _CHANCE:
        return None

    own = {phase: float(np.median(taken[slow])) for phase, taken in rounds.phases.items()}
    theirs = {phase: float(np.median(taken[others])) for phase, taken in rounds.phases.items()}
    excess = {
        phase: float(np.median(taken[slow] - np.median(taken[others], axis=0)))
        for phase, taken in rounds.phases.items()
    }
    phase = max(excess, key=lambda name: excess[name])
    rank = rounds.ranks[slow]
    cost_ns = rounds.cost_of(rank)
    between = {"between": "phases" if rounds.unit == "steps" else "calls", "outside": "steps"}
    where = f"between its {between[phase]} it" if phase in between else f"its {phase}"
    return Straggler(
        rank=rank,
        share=float(share),
        lost_ns=round(cost_ns),
        phase=phase,
        own_ns=round(own[phase]),
        theirs_ns=round(theirs[phase]),
        factor=own[phase] / theirs[phase] if theirs[phase] else math.inf,
        steps=count,
        evidence=(
            f"{rank_on(rank, hosts)} came last in {times_last[slow]} of {count} {rounds.unit}, and the others waited "
            f"{ms(cost_ns)} of each {rounds.unit.removesuffix('s')} for it (mean); {where} takes {ms(own[phase])}, "
            f"theirs {ms(theirs[phase])} (medians)"
        ),
    )


def fewest_steps(world_size: int) -> int:
    """Return the number of steps in which one rank must be the last, each time, before it is reported.

    Example:
        >>> fewest_steps(2), fewest_steps(4), fewest_steps(64)
        (8, 5, 5)
    """
    count = _FEWEST_STEPS
    while _chance(count, count, world_size) > _CHANCE:
        count += 1
    return count


def _chance(times: int, count: int, world: int) -> float:
    """Return the probability that any of `world` equally fast ranks is last at least `times` times in `count`.

    Example:
        >>> _chance(5, 5, 4), round(_chance(11, 18, 4), 3), _chance(5, 5, 2)
        (0.00390625, 0.005, 0.0625)

    Source: https://en.wikipedia.org/wiki/Binomial_distribution (upper tail), times the number of ranks.
    """
    p = 1 / world
    tail = sum(math.comb(count, k) * p**k * (1 - p) ** (count - k) for k in range(times, count + 1))
    return min(1.0, world * tail)
