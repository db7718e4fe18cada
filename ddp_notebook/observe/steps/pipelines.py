"""Steps of pipelines: the actions of each stage on each microbatch, and the bubble of the schedule itself.

    rank 0   F0 F1 F2 F3 .. .. B0 .. B1 ..          measured times
    rank 1      F0 F1 F2 F3 B0 .. B1 ..
                                                    ideal: the same actions, in the same order on each rank, each with
                                                    its median duration, and started as soon as possible

An action begins when the previous action of its rank has ended and its inputs exist. A forward needs that of the
previous stage. A backward needs its own forward and the gradient of the next stage. A weight gradient needs its input
gradient.

Source: https://arxiv.org/abs/2104.04473, section 2.2 (definition of the pipeline bubble).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ddp_notebook.errors import UsageError
from ddp_notebook.observe.tables.matching import RowSource, in_cell
from ddp_notebook.observe.views import Action, Pipeline, bubble_of
from ddp_notebook.records.schema import SPANS, Rows

FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = KINDS = (
    *("forward", "backward"),
    *("input gradient", "weight gradient"),
)
_UNITS = {FORWARD: 1, BACKWARD: 2, INPUT_GRADIENT: 1, WEIGHT_GRADIENT: 1}
_PIPELINE = SPANS.index("pipeline")
Key = tuple[str, int, int]  # kind, stage, microbatch


class _Step(NamedTuple):
    """One step of a schedule: its span on each of its ranks."""

    schedule: int  # number of a text
    cell: int
    number: int
    spans: dict[int, tuple[int, int, int]]  # rank -> number of the span, number of stages, number of microbatches


def pipelines(recording: RowSource, cell: int | None = None, last: int | None = None) -> list[Pipeline]:
    """Return the steps of all pipelines of a cell that are known on all their stages, in the order of their end.

    Args:
        recording: the recorded tables.
        cell: number of a cell; None: all cells.
        last: number of steps of each schedule, the last ones; None: all.
    """
    spans = recording.rows("span")
    spans = spans[(spans["pipeline"] > 0) & (spans["end_ns"] >= 0)]
    if cell is not None:
        spans = spans[spans["cell"] == cell]
    actions = spans[spans["kind"] != _PIPELINE]
    whole = (_pipeline(recording, step, actions) for step in _steps(spans[spans["kind"] == _PIPELINE], last))
    return sorted((one for one in whole if one is not None), key=lambda one: one.actions[-1].end_ns)


def pipeline(
    recording: RowSource, cell: int | None = None, step: int | None = None, rank: int | None = None
) -> Pipeline:
    """Return one step of a pipeline.

    Args:
        recording: the recorded tables.
        cell: number of the cell; None: the last one with a pipeline.
        step: its number in the cell, from 0; None: a step of typical length.
        rank: select the pipeline in which this rank has a stage; None: the last pipeline.

    Raises:
        UsageError: no such step was recorded.
    """
    found = [one for one in pipelines(recording, cell) if rank is None or rank in one.ranks]
    where = in_cell(recording, cell) + ("" if rank is None else f" with a stage on rank {rank}")
    if not found:
        raise UsageError(
            f"no complete pipeline step was recorded{where}: run a schedule of torch.distributed.pipelining in a cell "
            "on the ranks, with %ddp_record meta or values"
        )
    found = [one for one in found if (one.cell, one.schedule) == (found[-1].cell, found[-1].schedule)]
    if step is None:
        later = found[1:] or found  # in the first step, much code runs for the first time
        return sorted(later, key=lambda one: one.span_ns)[(len(later) - 1) // 2]
    if step not in (numbers := [one.step for one in found]):
        raise UsageError(f"{found[-1].schedule}{where} has no step {step}; its steps are {numbers[0]} to {numbers[-1]}")
    return found[numbers.index(step)]


def _steps(spans: Rows, last: int | None) -> Iterable[_Step]:
    """Match the steps of all ranks, starting from the last one, because the oldest rows are dropped first."""
    for its_cell, name in np.unique(spans[["cell", "name"]]).tolist():
        own = spans[(spans["cell"] == its_cell) & (spans["name"] == name)]
        own = own[np.argsort(own["start_ns"], kind="stable")]
        of_rank = {
            rank: own[own["rank"] == rank][["span", "stage", "microbatch"]].tolist()
            for rank in np.unique(own["rank"]).tolist()
        }
        count = max(map(len, of_rank.values()))
        for back in range(count if last is None else min(count, last), 0, -1):
            yield _Step(
                name, its_cell, count - back, {r: some[-back] for r, some in of_rank.items() if len(some) >= back}
            )


def _pipeline(recording: RowSource, step: _Step, actions: Rows) -> Pipeline | None:
    """Return None if an action is missing."""
    measured: list[Action] = []
    for rank, (span, _, _) in step.spans.items():
        mine = actions[(actions["rank"] == rank) & (actions["pipeline"] == span)]
        for row in mine[["stage", "microbatch", "kind", "start_ns", "end_ns"]].tolist():
            stage, microbatch, kind, start_ns, end_ns = row
            measured.append(_action(rank, (SPANS[kind], stage, microbatch), start_ns, end_ns))
    _, stages, microbatches = next(iter(step.spans.values()))
    if sum(one.kind == FORWARD for one in measured) != stages * microbatches:
        return None
    measured.sort(key=lambda one: (one.start_ns, one.end_ns))
    return Pipeline(
        schedule=recording.text(step.schedule),
        cell=step.cell,
        step=step.number,
        ranks=tuple(sorted(step.spans)),
        stages=stages,
        microbatches=microbatches,
        actions=tuple(measured),
        ideal=ideal(measured),
        even_bubble=_even_bubble(measured),
    )


def ideal(measured: Sequence[Action]) -> tuple[Action, ...]:
    """Return these actions without communication, each with the median duration of its stage and kind, starting at 0.

    Args:
        measured: actions ordered by their start.

    Example:
        >>> took = [(0, 0, 0, 10), (0, 1, 10, 20), (1, 0, 15, 25), (1, 1, 30, 40)]  # rank, microbatch, from, to
        >>> forwards = [
        ...     Action(rank=rank, stage=rank, microbatch=m, kind="forward", start_ns=start, end_ns=end)
        ...     for rank, m, start, end in took
        ... ]
        >>> [(one.rank, one.start_ns) for one in ideal(forwards)]
        [(0, 0), (0, 10), (1, 10), (1, 20)]
    """
    lasts: dict[tuple[int, str], list[int]] = {}
    for one in measured:
        lasts.setdefault((one.stage, one.kind), []).append(one.end_ns - one.start_ns)
    typical = {key: round(float(np.median(some))) for key, some in lasts.items()}
    lasts_ns = {_key(one): typical[one.stage, one.kind] for one in measured}
    return scheduled(orders_of(measured), lasts_ns)


def _even_bubble(measured: Sequence[Action]) -> float:
    actions = scheduled(orders_of(measured), {_key(one): _UNITS[one.kind] for one in measured})
    return bubble_of(actions, len({one.rank for one in measured}))


def orders_of(measured: Sequence[Action]) -> dict[int, list[Key]]:
    """Return the order of the actions on each rank.

    Args:
        measured: actions ordered by their start.
    """
    orders: dict[int, list[Key]] = {}
    for one in measured:
        orders.setdefault(one.rank, []).append(_key(one))
    return orders


def scheduled(orders: Mapping[int, Sequence[Key]], lasts_ns: Mapping[Key, int]) -> tuple[Action, ...]:
    """Return the actions with the times that they would have if messages took no time.

    Args:
        orders: by rank, the kind, stage and microbatch of each action, in execution order.
        lasts_ns: duration of each action.

    Returns:
        Actions ordered by their start. Actions that would wait forever, because ranks have contradictory orders, are
        left out.

    Example:
        >>> orders = {0: [("forward", 0, 0), ("forward", 0, 1)], 1: [("forward", 1, 0), ("forward", 1, 1)]}
        >>> lasts = dict.fromkeys([*orders[0], *orders[1]], 10)
        >>> [one.end_ns for one in scheduled(orders, lasts)]
        [10, 20, 20, 30]
    """
    every = {key for order in orders.values() for key in order}
    ended: dict[Key, int] = {}
    free_ns, at = dict.fromkeys(orders, 0), dict.fromkeys(orders, 0)
    found: list[Action] = []
    has_moved = True
    while has_moved:
        has_moved = False
        for rank, order in orders.items():
            while at[rank] < len(order) and all(need in ended for need in _needs(order[at[rank]], every)):
                key = order[at[rank]]
                start_ns = max([free_ns[rank], *(ended[need] for need in _needs(key, every))])
                end_ns = free_ns[rank] = ended[key] = start_ns + lasts_ns[key]
                found.append(_action(rank, key, start_ns, end_ns))
                at[rank] += 1
                has_moved = True
    return tuple(sorted(found, key=lambda one: (one.start_ns, one.end_ns, one.rank)))


def _action(rank: int, key: Key, start_ns: int, end_ns: int) -> Action:
    kind, stage, microbatch = key
    return Action(rank=rank, stage=stage, microbatch=microbatch, kind=kind, start_ns=start_ns, end_ns=end_ns)


def _key(one: Action) -> Key:
    return one.kind, one.stage, one.microbatch


def _needs(key: Key, every: set[Key]) -> list[Key]:
    """Return the actions that must be complete before an action, limited to those in `every`."""
    kind, stage, microbatch = key
    if kind == FORWARD:
        needs = [(FORWARD, stage - 1, microbatch)]
    elif kind == WEIGHT_GRADIENT:
        needs = [(INPUT_GRADIENT, stage, microbatch)]
    else:
        behind = [(later, stage + 1, microbatch) for later in (BACKWARD, INPUT_GRADIENT)]
        needs = [(FORWARD, stage, microbatch), *behind]
    return [need for need in needs if need in every]
