"""Communication of recorded steps, without the time that ranks were blocked in it.

The *own time* of a rank stands still while the rank is blocked in a collective of all ranks:

    recorded    |forward |backward  .b0   .b1 |~~~ blocked ~~~|optimizer|
    own time    |forward |backward  .b0   .b1 |optimizer|

So on another network, the same events happen at the same own times, and only the blocked time differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ddp_notebook.observe.forecast.network import ALL_REDUCE, OPERATIONS, Transfer
from ddp_notebook.observe.steps.cycles import Cycles, cycles
from ddp_notebook.observe.steps.run import counted
from ddp_notebook.observe.steps.steps import Intervals, blocked_from, covers, ends_of, samples_of
from ddp_notebook.observe.tables.matching import Numbers, RowSource, Times
from ddp_notebook.observe.tables.ring_buffer import select
from ddp_notebook.records.schema import ORIGINS, SPANS, Rows

Floats = npt.NDArray[np.float64]
_SCALED = [SPANS.index(kind) for kind in ("input", "workers", "forward", "backward")]
_BACKWARD, _OPTIMIZER = SPANS.index("backward"), SPANS.index("optimizer")
_DDP = (ORIGINS.index("ddp"), ORIGINS.index("ddp hook"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One collective of all R ranks.

    Own times are ns from the begin of the step, in two parts: outside of the passes, and in input, forward and
    backward.
    """

    op: str
    nbytes: int  # input of a rank
    ready: Floats  # (R, 2)
    wait: Floats | None  # (R, 2); None: the program does not wait for it in this step
    backward: int  # number of the backward pass in the step that synchronises this bucket, from 1; 0: no bucket
    begun_ns: Floats  # (R,) recorded times
    ended_ns: Floats  # (R,)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvents:
    """Communication of one step on R ranks."""

    events: tuple[Event, ...]  # in the order of issue
    end: Floats  # (R, 2) own time of the step
    passes: int  # number of backward passes
    begins: Floats  # (passes, R, 2) own time of the begin of each backward pass
    lasted_ns: Floats  # (R,) recorded duration


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSteps:
    """Chosen steps of one cell, on all its ranks."""

    ranks: tuple[int, ...]
    steps: tuple[StepEvents, ...]
    samples: float | None  # mean of a rank and step; None: unknown

    @property
    def measured_ns(self) -> float:
        """Mean duration of these steps."""
        return float(np.mean([step.lasted_ns.mean() for step in self.steps]))


def recorded_steps(recording: RowSource, most: int) -> RecordedSteps:
    """Return typical steps, evenly spread over the cell, that all ranks have taken with the same collectives.

    Args:
        recording: rows of one cell.
        most: number of steps.
    """
    spans = recording.rows("span")
    of_rank = {rank: rows for rank, rows in _by_rank(spans).items() if (rows["kind"] == _OPTIMIZER).any()}
    found = {rank: cycles(rows) for rank, rows in of_rank.items()}
    bounds = {rank: one for rank, one in found.items() if one is not None and len(one.ends_ns)}
    ranks = tuple(sorted(bounds))
    numbers = _chosen(list(bounds.values()), most)
    calls = recording.rows("call")
    calls_of = _by_rank(select(calls, _is_of_all(recording, calls, ranks)))
    rows = [
        _rank(recording, calls_of.get(rank, calls[:0]), of_rank[rank], bounds[rank], numbers - bounds[rank].first)
        for rank in ranks
    ]
    steps = [_joined(rows, at) for at in range(len(numbers))]
    samples = np.concatenate([one.samples for one in rows]) if rows else np.zeros(0)
    known = samples[samples >= 0]
    return RecordedSteps(
        ranks=ranks,
        steps=tuple(step for step in steps if step is not None),
        samples=float(known.mean()) if len(known) and known.any() else None,
    )


def _by_rank(rows: Rows) -> dict[int, Rows]:
    rows = select(rows, np.argsort(rows["rank"], kind="stable"))
    ranks, begins = np.unique(rows["rank"], return_index=True)
    return dict(zip(ranks.tolist(), np.split(rows, begins[1:]), strict=True)) if len(ranks) else {}


def _chosen(bounds: Sequence[Cycles], most: int) -> Numbers:
    """Return the numbers of typical steps that all ranks have, evenly spread."""
    if not bounds:
        return np.zeros(0, np.int64)
    numbers = np.concatenate([one.first + np.arange(len(one.ends_ns)) for one in bounds])
    durations = np.concatenate([one.ends_ns - one.begins_ns for one in bounds])
    kept = counted(numbers, durations)[0]
    unique, counts = np.unique(numbers, return_counts=True)
    kept = kept[np.isin(kept, unique[counts == len(bounds)])]
    return kept[np.linspace(0, len(kept) - 1, min(most, len(kept))).round().astype(int)]


def _is_of_all(recording: RowSource, calls: Rows, ranks: Sequence[int]) -> npt.NDArray[np.bool_]:
    """Return a mask of the collectives of all ranks with a known cost. A bucket of a comm hook has no number."""
    groups = [
        one for one in np.unique(calls["group"]).tolist() if tuple(sorted(recording.group_of(one)["ranks"])) == ranks
    ]
    ops = [one for one in np.unique(calls["op"]).tolist() if recording.text(one) in OPERATIONS]
    return np.isin(calls["group"], groups) & np.isin(calls["op"], ops) & (calls["call"] > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    """Chosen steps of one rank: n calls, in the order of their issue, in S steps."""

    rows: Rows  # (n,)
    ops: list[str]  # (n,)
    begun: Times  # (n,)
    ended: Times
    ready: Floats  # (n, 2) own time
    wait: Floats  # (n, 2)
    has_wait: npt.NDArray[np.bool_]  # (n,)
    is_bucket: npt.NDArray[np.bool_]  # (n,)
    calls: Numbers  # (S, 2) first call of each step, and the one after its last
    backwards: Numbers  # (m,) span of each backward pass
    begins: Floats  # (m, 2) own time of its begin
    passes: Numbers  # (S, 2) backward passes of each step, as `calls`
    begin: Floats  # (S, 2) own time of the begin of each step
    end: Floats  # (S, 2)
    lasted_ns: Times  # (S,)
    samples: Numbers  # (S,) -1: unknown


def _rank(recording: RowSource, calls: Rows, spans: Rows, bounds: Cycles, chosen: Numbers) -> _Rank:
    begins, ends = bounds.begins_ns[chosen], bounds.ends_ns[chosen]

    def inside(rows: Rows, column: str) -> Rows:
        """Return the rows that begin in a chosen step, in this order."""
        rows = select(rows, np.argsort(rows[column], kind="stable"))
        at = np.searchsorted(begins, rows[column], "right") - 1
        return select(rows, (at >= 0) & (rows[column] < ends[np.maximum(at, 0)])) if len(begins) else rows[:0]

    calls = inside(calls, "issue_ns")
    spans = select(spans, (spans["end_ns"] >= 0) & np.isin(spans["thread"], bounds.threads))
    spans = inside(spans, "start_ns")
    begun, ended = ends_of(calls)
    since = blocked_from(calls, begun, ended, np.isin(calls["thread"], bounds.threads))
    scaled = select(spans, np.isin(spans["kind"], _SCALED))
    backwards = select(spans, spans["kind"] == _BACKWARD)
    own = _own_time((since, ended), (scaled["start_ns"], scaled["end_ns"]))
    is_bucket = np.isin(calls["origin"], _DDP) & (calls["backward"] != 0)
    waits = _waits(calls, begun, ended, since, is_bucket)
    return _Rank(
        rows=calls,
        ops=[recording.text(one) for one in calls["op"].tolist()],
        begun=begun,
        ended=ended,
        ready=own(begun),
        wait=own(waits),
        has_wait=waits >= 0,
        is_bucket=is_bucket,
        calls=np.searchsorted(calls["issue_ns"], np.stack([begins, ends], axis=-1)),
        backwards=backwards["span"],
        begins=own(backwards["start_ns"]),
        passes=np.searchsorted(backwards["start_ns"], np.stack([begins, ends], axis=-1)),
        begin=own(begins),
        end=own(ends),
        lasted_ns=ends - begins,
        samples=samples_of(spans, np.append(begins, ends[-1:])),
    )


def _waits(rows: Rows, begun: Times, ended: Times, since: Times, is_bucket: npt.NDArray[np.bool_]) -> Times:
    """Return when the program waits for each call: for a bucket after the last one of its backward; -1: never."""
    waits = np.where(since < ended, since, -1)
    if is_bucket.any():
        _, back = np.unique(rows["backward"][is_bucket], return_inverse=True)
        last = np.zeros(int(back.max()) + 1, np.int64)
        np.maximum.at(last, back, begun[is_bucket])
        waits[is_bucket] = last[back]
    return waits


def _own_time(blocked: Intervals, scaled: Intervals) -> Callable[[Times], Floats]:
    lasts = blocked[0] < blocked[1]
    blocked = blocked[0][lasts], blocked[1][lasts]
    cuts = np.unique(np.concatenate([*blocked, *scaled, np.zeros(1, np.int64)]))
    free, is_scaled = ~covers(*blocked, cuts), covers(*scaled, cuts)
    lengths = np.diff(cuts)
    until = [np.append(0, np.cumsum(np.where(mask, lengths, 0))) for mask in (free & ~is_scaled, free & is_scaled)]

    def own(times: Times) -> Floats:
        """Return the own time (n, 2) of these times."""
        after = np.maximum(times - cuts[-1], 0)  # not blocked, and outside of the passes
        return np.stack([np.interp(times, cuts, until[0]) + after, np.interp(times, cuts, until[1])], axis=-1)

    return own


def _joined(ranks: Sequence[_Rank], at: int) -> StepEvents | None:
    """Return a step of all ranks; None if they made different calls, or the end of one is unknown."""
    spans = [slice(*one.calls[at].tolist()) for one in ranks]
    passes = [slice(*one.passes[at].tolist()) for one in ranks]
    both = list(zip(ranks, spans, strict=True))
    calls = {tuple(zip(one.ops[span], one.rows["nbytes_in"][span].tolist(), strict=True)) for one, span in both}
    counts = {span.stop - span.start for span in passes}
    if len(calls) != 1 or len(counts) != 1 or any((one.rows["end_ns"][span] < 0).any() for one, span in both):
        return None

    def joined(name: str, which: Sequence[slice] = spans) -> Any:
        """Return a column of all ranks: (n, R, ...)."""
        return np.stack([getattr(one, name)[span] for one, span in zip(ranks, which, strict=True)], axis=1)

    begin = np.stack([one.begin[at] for one in ranks])
    first, span = both[0]
    number = {number: place for place, number in enumerate(first.backwards[passes[0]].tolist(), 1)}
    backward = np.where(first.is_bucket[span], first.rows["backward"][span], 0).tolist()
    ready, wait, has_wait = joined("ready") - begin, joined("wait") - begin, joined("has_wait").all(axis=1)
    begun, ended = joined("begun"), joined("ended")
    events = tuple(
        Event(
            op=op,
            nbytes=nbytes,
            ready=ready[place],
            wait=wait[place] if has_wait[place] else None,
            backward=number.get(backward[place], 0),
            begun_ns=begun[place],
            ended_ns=ended[place],
        )
        for place, (op, nbytes) in enumerate(calls.pop())
    )
    return StepEvents(
        events=events,
        end=np.stack([one.end[at] for one in ranks]) - begin,
        passes=counts.pop(),
        begins=joined("begins", passes) - begin,
        lasted_ns=np.array([one.lasted_ns[at] for one in ranks], np.float64),
    )


def transfers(steps: Sequence[StepEvents]) -> Iterator[Transfer]:
    """Yield the all-reduces of these steps. Those that followed each other without a pause count together."""
    for step in steps:
        free_ns, messages, nbytes, ns, is_pure = -np.inf, 0, 0, 0.0, True
        for event in step.events:
            arrived, ended = float(event.begun_ns.max()), float(event.ended_ns.max())
            if arrived >= free_ns:
                if messages and is_pure:
                    yield Transfer(messages, nbytes, ns)
                messages, nbytes, ns, is_pure = 0, 0, 0.0, True
            messages, nbytes = messages + 1, nbytes + event.nbytes
            ns += max(0.0, ended - max(arrived, free_ns))
            is_pure &= event.op in ALL_REDUCE
            free_ns = max(free_ns, ended)
        if messages and is_pure:
            yield Transfer(messages, nbytes, ns)


def with_buckets(step: StepEvents, most_nbytes: int) -> StepEvents:
    """Return the step with its gradients in other buckets.

    The gradients of a recorded bucket count as ready one after the other at an even rate, because the sizes of single
    parameters are not recorded.

    Args:
        most_nbytes: size of a bucket in bytes.
    """
    made = [event for event in step.events if not event.backward]
    for number in range(1, step.passes + 1):
        own = [event for event in step.events if event.backward == number]
        if not own:
            continue
        ends = np.cumsum([event.nbytes for event in own])
        edges = np.concatenate(([0], ends))
        times = np.stack([step.begins[number - 1], *(event.ready for event in own)])  # (buckets + 1, R, 2)
        until = [*range(most_nbytes, int(ends[-1]), most_nbytes), int(ends[-1])]
        for before, end in zip([0, *until], until, strict=False):
            after = int(np.searchsorted(edges, end))  # the recorded bucket that contains this byte
            share = (end - edges[after - 1]) / max(1, edges[after] - edges[after - 1])
            ready = times[after - 1] + share * (times[after] - times[after - 1])
            made.append(replace(own[-1], nbytes=end - before, ready=ready))
    made.sort(key=lambda event: float(event.ready.sum(axis=-1).mean()))
    return replace(step, events=tuple(made))
