"""Breakdown of the time of a training step, on each rank.

    step       |in.|forward   |backward                              |opt|
    bucket 0                        [=====]
    bucket 1                               [===========-----]
                                          issued ^  last rank ^ arrives ^ end
    compute        ^^^^^^^^^^^ ^^^^^^^^^^^^^^^^^^
    waiting                                      ~~~~~~~~~~~~~
    exposed                                                   ~~~~~~~~~~

Each instant of a step belongs to exactly one part. A rank that is blocked in communication waits until the last rank
has arrived; the remaining blocked time is exposed. For all other time, input has priority over forward and backward,
and these have priority over the optimizer. Time without any span is `rest`.

A thread that waits for the answer of a remote call counts as waiting in any phase. If the same rank executes calls of
others at that time, it counts as compute.

Times are those of the host. A GPU may run later than its host. Then only waits of the host are visible.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ddp_notebook.observe.steps.cycles import Cycles, cycles, of_threads
from ddp_notebook.observe.steps.run import counted
from ddp_notebook.observe.tables.distinct import distinct
from ddp_notebook.observe.tables.matching import (
    Numbers,
    RowSource,
    Times,
    arrivals,
    calls_of,
    match_collectives,
    match_messages,
)
from ddp_notebook.observe.tables.ring_buffer import select
from ddp_notebook.observe.tables.rpc_rows import latest
from ddp_notebook.observe.views import WARM_UP, Bucket, Step
from ddp_notebook.records.schema import ORIGINS, RPC_KINDS, RPC_SIDES, SPANS, Rows

_DDP = (ORIGINS.index("ddp"), ORIGINS.index("ddp hook"))
_PARTS = {  # part of a step -> kinds of its spans
    "input": ("input", "workers"),
    "workers": ("workers",),
    "forward": ("forward", "evaluation"),
    "backward": ("backward", "input gradient", "weight gradient"),
    "optimizer": ("optimizer",),
}
_IS_PART = {part: np.isin(np.arange(256), [*map(SPANS.index, kinds)]) for part, kinds in _PARTS.items()}
_CALLER, _CALLEE = map(RPC_SIDES.index, ("caller", "callee"))
_ANSWERED = [RPC_KINDS.index(kind) for kind in ("rpc_sync", "to_here")]  # calls whose caller waits
_FUTURE = SPANS.index("future")
# Parts of a step as returned by `parts`: those of `Step`, and the two parts of its compute.
PARTS = (
    *("input", "workers", "forward", "backward", "optimizer", "compute", "own_forward", "own_backward"),
    *("communication", "overlapped", "exposed", "waiting", "answers", "rest"),
)
Intervals = tuple[Times, Times]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTable:
    """Steps in columns, by cell, rank and number: n steps."""

    rank: Numbers
    cell: Numbers
    number: Numbers  # number in the cell, from 0
    start_ns: Times
    end_ns: Times
    samples: Numbers  # -1: unknown
    is_pipelined: npt.NDArray[np.bool_]  # its rank has a pipeline stage, so it waits for the schedule, not for a rank
    parts: dict[str, Times]  # nanoseconds by the names in `PARTS`
    calls: tuple[tuple[Rows, Times, Times, Layouts], ...]  # calls with the begins and ends of their steps, by rank

    def __len__(self) -> int:
        return len(self.rank)

    @property
    def duration_ns(self) -> Times:
        return self.end_ns - self.start_ns

    @property
    def ranks(self) -> list[int]:
        """Ranks that have steps, ascending."""
        return [int(rank) for rank in np.unique(self.rank)]

    def __getitem__(self, chosen: npt.NDArray[np.bool_]) -> StepTable:
        """Return the steps that a mask selects."""
        return StepTable(
            rank=self.rank[chosen],
            cell=self.cell[chosen],
            number=self.number[chosen],
            start_ns=self.start_ns[chosen],
            end_ns=self.end_ns[chosen],
            samples=self.samples[chosen],
            is_pipelined=self.is_pipelined[chosen],
            parts={name: column[chosen] for name, column in self.parts.items()},
            calls=self.calls,
        )

    def of_cell(self, cell: int) -> StepTable:
        return self[self.cell == cell]

    @property
    def settled(self) -> StepTable:
        """Steps after the first two of a cell, or all steps if there are only these."""
        later = self.number >= WARM_UP
        return self[later] if later.any() else self

    @property
    def typical(self) -> StepTable:
        """Steps over which a mean is taken, see `run.counted`. All must be of one cell."""
        return self[np.isin(self.number, counted(self.number, self.duration_ns)[0])]

    def steps(self) -> list[Step]:
        """Return the steps as objects."""
        buckets: dict[tuple[int, int], list[Bucket]] = {}
        for calls, begins, ends, layouts in self.calls:
            buckets |= _buckets(calls, begins, ends, layouts)
        names = [name for name in PARTS if not name.startswith("own_")]
        columns = [self.parts[name].tolist() for name in names]
        fields = [f"{name}_ns" for name in names]
        return [
            Step(
                rank=rank,
                cell=cell,
                step=number,
                start_ns=start_ns,
                end_ns=end_ns,
                samples=None if samples < 0 else samples,
                buckets=tuple(buckets.get((rank, start_ns), ())),
                **dict(zip(fields, row, strict=True)),
            )
            for rank, cell, number, start_ns, end_ns, samples, row in zip(
                *(one.tolist() for one in (self.rank, self.cell, self.number, self.start_ns, self.end_ns)),
                self.samples.tolist(),
                zip(*columns, strict=True),
                strict=True,
            )
        ]


def steps(recording: RowSource, cell: int | None = None, rank: int | None = None) -> list[Step]:
    """Return the optimizer steps of a cell, by rank, with the breakdown of their time.

    Args:
        recording: the recorded tables.
        cell: number of a cell; None: all cells.
        rank: number of a rank; None: all ranks.

    Returns:
        Completed steps. Several backward passes, models or optimizers in a step count together, including passes that
        accumulate gradients.

    Example:
        >>> from tests.observe.synthetic import simulate
        >>> step = steps(simulate(steps=5, slow=2, phase="forward", extra_ms=50), rank=0)[3]
        >>> step.duration_ns // 10**6, step.compute_ns // 10**6, step.waiting_ns // 10**6, step.buckets[0].parameters
        (84, 30, 50, ('layers.3.weight',))

    Source: https://docs.pytorch.org/docs/stable/notes/ddp.html (a backward pass ends when all buckets are reduced).
    """
    return measure(recording, cell, rank).steps()


def measure(recording: RowSource, cell: int | None = None, rank: int | None = None) -> StepTable:
    """Return the steps as a table."""
    spans, calls = recording.rows("span"), calls_of(recording, cell)
    if cell is not None:
        spans = _all_or(spans, spans["cell"] == cell)
    calls_of_rank, spans_of_rank = _ByRank(calls), _ByRank(spans)
    calls, spans = select(calls, calls_of_rank.order), select(spans, spans_of_rank.order)
    waited = waited_for(recording, calls)
    remote = latest(recording.rows("rpc"))
    layouts = Layouts(recording)
    found: list[StepTable] = []
    for key in np.unique(spans_of_rank.keys[spans["kind"] == SPANS.index("optimizer")]).tolist():
        if rank is not None and key & 0xFFFFFFFF != rank:
            continue
        own_spans, own_calls = spans[spans_of_rank.part(key)], calls_of_rank.part(key)
        bounds = cycles(own_spans)
        if bounds is not None and len(bounds.ends_ns):
            own_remote = select(remote, remote["rank"] == key & 0xFFFFFFFF)
            found.append(_steps_of(bounds, own_spans, calls[own_calls], waited[own_calls], own_remote, layouts))
    return _joined(found)


class _ByRank:
    """Rows by cell and rank, in an order in which those of a rank in a cell are consecutive.

    Args:
        rows: (n,) with the columns "cell" and "rank".
    """

    def __init__(self, rows: Rows) -> None:
        keys = rows["cell"].astype(np.int64) << 32 | rows["rank"]
        self.order = np.argsort(keys, kind="stable")
        self.keys: Numbers = keys[self.order]

    def part(self, key: int) -> slice:
        """Return the place of the rows with a key in this order."""
        begin, end = np.searchsorted(self.keys, (key, key + 1)).tolist()
        return slice(begin, end)


def _all_or(rows: Rows, chosen: npt.NDArray[np.bool_]) -> Rows:
    """Return the chosen rows; the table itself, without a copy, if all are chosen."""
    return rows if chosen.all() else select(rows, chosen)


def _joined(tables: Sequence[StepTable]) -> StepTable:
    def column(name: str) -> npt.NDArray[np.int64]:
        return np.concatenate([np.zeros(0, np.int64), *(getattr(one, name) for one in tables)])

    return StepTable(
        **{name: column(name) for name in ("rank", "cell", "number", "start_ns", "end_ns", "samples")},
        is_pipelined=np.concatenate([np.zeros(0, bool), *(one.is_pipelined for one in tables)]),
        parts={name: np.concatenate([np.zeros(0, np.int64), *(one.parts[name] for one in tables)]) for name in PARTS},
        calls=tuple(some for one in tables for some in one.calls),
    )


def waited_for(recording: RowSource, calls: Rows) -> Times:
    """Return the time (n,) that each call waited for other ranks."""
    waited = np.zeros(len(calls), np.int64)
    for matched in (match_collectives(recording, calls), match_messages(recording, calls)):
        waited[matched.index] = matched.waited_ns
    return waited


def _steps_of(bounds: Cycles, spans: Rows, calls: Rows, waited: Times, remote: Rows, layouts: Layouts) -> StepTable:
    begins, ends = bounds.begins_ns, bounds.ends_ns
    count, edges = len(ends), np.unique(np.concatenate((begins, ends)))
    rank, cell = int(spans["rank"][0]), int(spans["cell"][0])
    spans = _all_or(spans, (spans["end_ns"] >= 0) & of_threads(spans, bounds.threads))
    is_pipelined = bool((spans["kind"] == SPANS.index("pipeline")).any())
    samples, taken = np.full(count, -1), {name: np.zeros(count, np.int64) for name in PARTS}
    if len(edges) > 1:
        lasts = ends > begins  # a step without a duration must not get parts of the next one
        at = np.minimum(np.searchsorted(edges, begins), len(edges) - 2)
        calls, waited = in_order(calls, waited)
        is_own = of_threads(calls, bounds.threads)
        answers = answers_of(select(remote, of_threads(remote, bounds.threads)), spans)
        served = served_of(remote)
        between = parts(edges, spans, calls, waited, is_own, answers, served)
        taken = {name: np.where(lasts, between[name][at], 0) for name in PARTS}
        samples = samples if is_pipelined else np.where(lasts, samples_of(spans, edges)[at], -1)
    return StepTable(
        rank=np.full(count, rank),
        cell=np.full(count, cell),
        number=bounds.first + np.arange(count),
        start_ns=begins,
        end_ns=ends,
        samples=samples,
        is_pipelined=np.full(count, is_pipelined),
        parts=taken,
        calls=((calls, begins, ends, layouts),),
    )


def answers_of(remote: Rows, spans: Rows) -> Intervals:
    """Return the intervals in which the threads of these calls and spans waited for answers."""
    own = remote[(remote["side"] == _CALLER) & np.isin(remote["kind"], _ANSWERED) & (remote["end_ns"] >= 0)]
    waits = spans[spans["kind"] == _FUTURE]
    return (
        np.concatenate((own["start_ns"], waits["start_ns"])),
        np.concatenate((own["end_ns"], waits["end_ns"])),
    )


def served_of(remote: Rows) -> Intervals:
    """Return the intervals in which ranks executed calls of others."""
    own = remote[(remote["side"] == _CALLEE) & (remote["end_ns"] >= 0)]
    return own["start_ns"], own["end_ns"]


_NONE: Intervals = (np.zeros(0, np.int64), np.zeros(0, np.int64))


def parts(
    edges: Times,
    spans: Rows,
    calls: Rows,
    waited: Times,
    is_own: npt.NDArray[np.bool_],
    answers: Intervals = _NONE,
    served: Intervals = _NONE,
) -> dict[str, npt.NDArray[np.int64]]:
    """Split the time between consecutive edges into the parts in `PARTS`.

    Ranks can be measured together if their times were shifted so that they do not overlap.

    Args:
        edges: (n + 1,) in ascending order.
        spans: completed spans of the threads that step.
        calls: (m,) in the order of issue.
        waited: (m,) time that each call waited for other ranks.
        is_own: (m,) True for calls of a thread that steps.
        answers: begins and ends of waits for answers of remote calls.
        served: begins and ends of the execution of other ranks' calls.
    """
    of_kind = {part: is_part[spans["kind"]] for part, is_part in _IS_PART.items()}
    intervals = {part: (spans["start_ns"][chosen], spans["end_ns"][chosen]) for part, chosen in of_kind.items()}
    begun, ended = ends_of(calls)
    since = blocked_from(calls, begun, ended, is_own)
    is_blocking = since < ended
    blocked = since[is_blocking], ended[is_blocking]
    waiting = blocked[0], np.clip((begun + waited)[is_blocking], *blocked)
    intervals |= {"communication": (begun, ended), "blocked": blocked, "waiting": waiting}
    intervals |= {"answers": answers, "served": served}

    # Most of these arrays are in order, and a stable sort merges them.
    cuts = np.sort(np.concatenate([edges, *(side for both in intervals.values() for side in both)]), kind="stable")
    cuts = cuts[np.searchsorted(cuts, edges[0]) : np.searchsorted(cuts, edges[-1], "right")]
    cuts = cuts[np.concatenate(([True], cuts[1:] != cuts[:-1]))]  # `np.unique` takes three times as long
    lengths, first = np.diff(cuts), np.searchsorted(cuts, edges[:-1])
    nothing = np.zeros(len(cuts) - 1, bool)
    covered = {name: covers(*both, cuts) if len(both[0]) else nothing for name, both in intervals.items()}

    def total(mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """Return the total by step. Each step has a cut, because all edges are cuts."""
        return np.add.reduceat(np.where(mask, lengths, 0), first)

    free = ~covered["blocked"] & ~covered["answers"]
    loads = free & covered["input"]
    computes = free & ~covered["input"] & (covered["forward"] | covered["backward"])
    steps_on = free & ~loads & ~computes & covered["optimizer"]
    serves = ~covered["blocked"] & covered["served"] & ~loads & ~computes & ~steps_on
    answered = ~covered["blocked"] & covered["answers"] & ~serves
    own_backward, own_forward = total(computes & covered["backward"]), total(computes & ~covered["backward"])
    answers_ns = total(answered)
    return {
        "input": total(loads),
        "workers": total(loads & covered["workers"]),
        "forward": total(covered["forward"]),
        "backward": total(covered["backward"]),
        "compute": own_forward + own_backward + total(serves),
        "own_forward": own_forward,
        "own_backward": own_backward,
        "optimizer": total(steps_on),
        "communication": total(covered["communication"]),
        "overlapped": total(covered["communication"] & ~covered["blocked"]),
        "waiting": total(covered["waiting"]) + answers_ns,
        "answers": answers_ns,
        "exposed": total(covered["blocked"] & ~covered["waiting"]),
        "rest": total(free & ~loads & ~computes & ~steps_on & ~serves),
    }


def in_order(calls: Rows, waited: Times) -> tuple[Rows, Times]:
    """Return the calls in the order of issue, and the wait of each."""
    order = np.argsort(calls["issue_ns"], kind="stable")
    return select(calls, order), waited[order]


def ends_of(calls: Rows) -> tuple[Times, Times]:
    """Return when calls began and ended. If the end is unknown, a call lasts as long as the rank was blocked in it."""
    begun = arrivals(calls)
    ended = np.where(calls["end_ns"] >= 0, calls["end_ns"], begun + calls["blocked_ns"])
    return begun, np.maximum(ended, begun)


def blocked_from(calls: Rows, begun: Times, ended: Times, is_own: npt.NDArray[np.bool_]) -> Times:
    """Return the time (n,) from which the rank was blocked in the call; the call's end if it was not blocked.

    The recorder does not see all waits of DDP. It waits for buckets after the last one was issued, and for other calls
    immediately.
    """
    since = ended.copy()
    is_ddp, in_backward = np.isin(calls["origin"], _DDP), calls["backward"] != 0
    is_seen = calls["blocked_ns"] > 0
    is_awaited = ~is_seen & np.where(is_ddp, ~in_backward, ~calls["is_async"])
    since[is_awaited] = begun[is_awaited]
    since[is_seen] = np.maximum(begun, ended - calls["blocked_ns"])[is_seen]
    since[~is_own & ~in_backward & ~is_ddp] = np.iinfo(np.int64).max  # another thread waited
    of_backward = np.flatnonzero(is_ddp & in_backward)
    if len(of_backward):
        first, back = distinct(calls["rank"][of_backward], calls["backward"][of_backward])
        last_issue = np.zeros(len(first), np.int64)
        np.maximum.at(last_issue, back, begun[of_backward])
        since[of_backward] = np.minimum(since[of_backward], last_issue[back])
    return since


def covers(starts: Times, ends: Times, cuts: Times) -> npt.NDArray[np.bool_]:
    """Return a mask (n,): True if an interval covers the time between a cut and the next.

    Args:
        starts, ends: begins and ends of the intervals.
        cuts: (n + 1,) in ascending order.
    """
    changes = [np.bincount(np.searchsorted(cuts, some), minlength=len(cuts) + 1) for some in (starts, ends)]
    return np.cumsum(changes[0] - changes[1])[: len(cuts) - 1] > 0


def samples_of(spans: Rows, edges: Times) -> Numbers:
    """Return the samples (n,) between consecutive edges; -1 if unknown.

    These are the samples that DataLoaders returned, or else those of the model with the most.
    """
    count = len(edges) - 1
    for kinds in (("input", "workers"), ("forward",)):
        rows = select(spans, np.isin(spans["kind"], [*map(SPANS.index, kinds)]) & (spans["samples"] >= 0))
        of_step = np.searchsorted(edges, rows["start_ns"], "right") - 1
        inside = (of_step >= 0) & (of_step < count)
        rows, of_step = _all_or(rows, inside), of_step[inside]
        if not len(rows):
            continue
        sums = [
            np.bincount(of_step[rows["name"] == name], rows["samples"][rows["name"] == name], count)
            for name in np.unique(rows["name"])
        ]
        known = np.bincount(of_step, minlength=count) > 0
        return np.where(known, np.max(sums, axis=0), -1).astype(np.int64)
    return np.full(count, -1)


def _buckets(calls: Rows, begins: Times, ends: Times, layouts: Layouts) -> dict[tuple[int, int], list[Bucket]]:
    """Return the buckets by rank and begin of the step, in the order of issue."""
    at: Numbers = np.searchsorted(begins, calls["issue_ns"], "right") - 1
    inside = (calls["bucket"] >= 0) & (at >= 0) & (calls["issue_ns"] < ends[np.maximum(at, 0)])
    calls, at = calls[inside], at[inside]
    found: dict[tuple[int, int], list[Bucket]] = {}
    columns = ("rank", "module", "bucket", "nbytes_in", "issue_ns", "end_ns")
    of_begin = begins[at].tolist()
    for begin, row in zip(of_begin, zip(*(calls[name].tolist() for name in columns), strict=True), strict=True):
        rank, module, bucket, nbytes, issue_ns, end_ns = row
        found.setdefault((rank, begin), []).append(
            Bucket(
                bucket=bucket,
                nbytes=nbytes,
                parameters=layouts.parameters(rank, module, bucket, issue_ns),
                issue_ns=issue_ns,
                end_ns=end_ns if end_ns >= 0 else None,
            )
        )
    return found


class Layouts:
    """Assignment of each model's parameters to buckets, over time."""

    def __init__(self, recording: RowSource) -> None:
        rows = np.sort(recording.rows("layout"), order="time_ns", kind="stable")
        parsed: dict[int, list[tuple[str, ...]]] = {}
        self._known: dict[tuple[int, int], tuple[list[int], list[list[tuple[str, ...]]]]] = {}
        for rank, time_ns, model, number in rows[["rank", "time_ns", "model", "buckets"]].tolist():
            if number not in parsed:
                parsed[number] = _parse(recording.text(number))
            times, layouts = self._known.setdefault((rank, model), ([], []))
            times.append(time_ns)
            layouts.append(parsed[number])

    def parameters(self, rank: int, model: int, bucket: int, issue_ns: int) -> tuple[str, ...]:
        """Return the parameters of a bucket at that time; () if they are unknown."""
        times, layouts = self._known.get((rank, model), ([], []))
        at = bisect.bisect_right(times, issue_ns) - 1
        if at < 0 or bucket >= len(layouts[at]):
            return ()
        return layouts[at][bucket]


def _parse(layout: str) -> list[tuple[str, ...]]:
    """Return the parameters of each bucket; [] if the text is not a layout, as in a damaged file."""
    try:
        return [tuple(bucket["parameters"]) for bucket in json.loads(layout)]
    except (ValueError, TypeError, KeyError):
        return []
