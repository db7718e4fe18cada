"""What the time of a training step went into, on each rank.

    step       |in.|forward   |backward                              |opt|
    bucket 0                        [=====]
    bucket 1                               [===========-----]
                                          issued ^  last rank ^ arrives ^ end
    compute        ^^^^^^^^^^^ ^^^^^^^^^^^^^^^^^^
    waiting                                      ~~~~~~~~~~~~~
    exposed                                                   ~~~~~~~~~~

Each instant of a step belongs to exactly one part. A rank that is blocked in communication waits until the last rank
has arrived, and what remains is exposed. Elsewhere input goes before forward and backward, and these go before the
optimizer; time that nothing covers is `rest`.

Times are those of the host. Where a GPU runs behind its host, only what the host waits for is seen.
"""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ddp_notebook.observe.steps.cycles import Cycles, cycles
from ddp_notebook.observe.tables.matching import (
    Numbers,
    RowSource,
    Times,
    arrivals,
    calls_of,
    match_collectives,
    match_messages,
)
from ddp_notebook.observe.views import Bucket, Step
from ddp_notebook.records.schema import ORIGINS, SPANS, Rows

_DDP = (ORIGINS.index("ddp"), ORIGINS.index("ddp hook"))
_PARTS = {  # kinds of spans, by the part of a step that they are
    "input": ("input",),
    "forward": ("forward",),
    "backward": ("backward", "input gradient", "weight gradient"),
    "optimizer": ("optimizer",),
}


class Measured(NamedTuple):
    """A step, and the two parts of its `compute_ns`."""

    step: Step
    own_forward_ns: int
    own_backward_ns: int
    is_pipelined: bool  # its rank has a stage of a pipeline: whoever waits there waits for the schedule


def steps(recording: RowSource, cell: int | None = None, rank: int | None = None) -> list[Step]:
    """The optimizer steps of a cell, by rank, with what their time went into.

    Args:
        recording: what the ranks have recorded.
        cell: of this cell only.
        rank: of this rank only.

    Returns:
        Steps that have ended. Several backwards, models or optimizers in a step count together, and so do the passes
        whose gradients are accumulated.

    Example:
        >>> from tests.observe.synthetic import simulate
        >>> step = steps(simulate(steps=5, slow=2, phase="forward", extra_ms=50), rank=0)[3]
        >>> step.duration_ns // 10**6, step.compute_ns // 10**6, step.waiting_ns // 10**6, step.buckets[0].parameters
        (84, 30, 50, ('layers.3.weight',))

    Source: https://docs.pytorch.org/docs/stable/notes/ddp.html (a backward ends when all buckets are reduced).
    """
    return [one.step for one in measure(recording, cell, rank)]


def measure(recording: RowSource, cell: int | None = None, rank: int | None = None) -> list[Measured]:
    """The same, with how much of the compute was forward and how much backward."""
    spans, calls = recording.rows("span"), calls_of(recording, cell)
    if cell is not None:
        spans = spans[spans["cell"] == cell]
    waited = waited_for(recording, calls)
    layouts = _Layouts(recording)
    found: list[Measured] = []
    keys = np.unique(spans[spans["kind"] == SPANS.index("optimizer")][["cell", "rank"]])
    for its_cell, its_rank in keys.tolist():
        if rank is not None and its_rank != rank:
            continue
        own_spans = spans[(spans["cell"] == its_cell) & (spans["rank"] == its_rank)]
        own_calls = (calls["cell"] == its_cell) & (calls["rank"] == its_rank)
        if (bounds := cycles(own_spans)) is not None:
            found += _steps_of(bounds, own_spans, calls[own_calls], waited[own_calls], layouts)
    return found


def typical(found: Sequence[Step]) -> list[Step]:
    """The steps that a mean is taken over: without the shortest and the longest twentieth, such as one with a pause.

    The same numbers on all ranks, since all of them wait where one pauses. Means of the parts of the same steps add up
    to the mean of these steps, which medians do not: a rank may wait in half of its steps.

    Args:
        found: of one cell, in any order.
    """
    of_number: dict[int, list[int]] = {}
    for step in found:
        of_number.setdefault(step.step, []).append(step.duration_ns)
    numbers = sorted(of_number, key=lambda number: sum(of_number[number]) / len(of_number[number]))
    odd = math.ceil(len(numbers) / 20) if len(numbers) > 2 else 0
    kept = set(numbers[odd : len(numbers) - odd])
    return [step for step in found if step.step in kept]


def waited_for(recording: RowSource, calls: Rows) -> Times:
    """(n,) how long each call waited for the other ranks."""
    waited = np.zeros(len(calls), np.int64)
    for matched in (match_collectives(recording, calls), match_messages(recording, calls)):
        waited[matched.index] = matched.waited_ns
    return waited


def _steps_of(bounds: Cycles, spans: Rows, calls: Rows, waited: Times, layouts: _Layouts) -> Iterator[Measured]:
    edges, count = bounds.bounds_ns, len(bounds.bounds_ns) - 1
    spans = spans[(spans["end_ns"] >= 0) & np.isin(spans["thread"], bounds.threads)]
    calls, waited = in_order(calls, waited)
    times = parts(edges, spans, calls, waited, np.isin(calls["thread"], bounds.threads))
    totals = {f"{name}_ns": values.tolist() for name, values in times.items()}
    own_forward, own_backward = totals.pop("own_forward_ns"), totals.pop("own_backward_ns")
    is_pipelined = bool((spans["kind"] == SPANS.index("pipeline")).any())
    samples = [None] * count if is_pipelined else samples_of(spans, edges)
    buckets = _buckets(calls, edges, layouts)
    for at in range(count):
        step = Step(
            rank=int(spans["rank"][0]),
            cell=int(spans["cell"][0]),
            step=bounds.first + at,
            start_ns=int(edges[at]),
            end_ns=int(edges[at + 1]),
            samples=samples[at],
            buckets=tuple(buckets.get(at, ())),
            **{name: values[at] for name, values in totals.items()},
        )
        yield Measured(step, own_forward[at], own_backward[at], is_pipelined)


def parts(
    edges: Times, spans: Rows, calls: Rows, waited: Times, is_own: npt.NDArray[np.bool_]
) -> dict[str, npt.NDArray[np.int64]]:
    """What the time between each edge and the next went into, by the names of `Step`, without "_ns".

    Args:
        edges: (n + 1,) in order.
        spans: that have ended, of the threads that step.
        calls: (m,) in the order of their issue.
        waited: (m,) for other ranks.
        is_own: (m,) whether a thread that steps has called it.

    Ranks whose times do not overlap, as they were moved apart, can be measured together.
    """
    count = len(edges) - 1
    of_kind = {part: spans[np.isin(spans["kind"], [*map(SPANS.index, kinds)])] for part, kinds in _PARTS.items()}
    intervals = {part: (rows["start_ns"], rows["end_ns"]) for part, rows in of_kind.items()}
    begun, ended = ends_of(calls)
    blocked_from = _blocked_from(calls, begun, ended, is_own)
    is_blocking = blocked_from < ended
    blocked = blocked_from[is_blocking], ended[is_blocking]
    waiting = blocked[0], np.clip((begun + waited)[is_blocking], *blocked)
    intervals |= {"communication": (begun, ended), "blocked": blocked, "waiting": waiting}

    cuts = np.unique(np.concatenate([edges, *(side for both in intervals.values() for side in both)]))
    cuts = cuts[(cuts >= edges[0]) & (cuts <= edges[-1])]
    lengths, of_step = np.diff(cuts), np.searchsorted(edges, cuts[:-1], "right") - 1
    covered = {name: _covers(*both, cuts[:-1]) for name, both in intervals.items()}

    def total(mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """By step; exact, as sums of nanoseconds stay below 2**53."""
        return np.bincount(of_step[mask], lengths[mask], count).astype(np.int64)

    free = ~covered["blocked"]
    computes = covered["forward"] | covered["backward"]
    compute = total(free & ~covered["input"] & computes)
    own_backward = total(free & ~covered["input"] & covered["backward"])
    return {
        "input": total(free & covered["input"]),
        "forward": total(covered["forward"]),
        "backward": total(covered["backward"]),
        "compute": compute,
        "own_forward": compute - own_backward,
        "own_backward": own_backward,
        "optimizer": total(free & ~covered["input"] & ~computes & covered["optimizer"]),
        "communication": total(covered["communication"]),
        "overlapped": total(covered["communication"] & free),
        "waiting": total(covered["waiting"]),
        "exposed": total(covered["blocked"] & ~covered["waiting"]),
        "rest": total(free & ~covered["input"] & ~computes & ~covered["optimizer"]),
    }


def in_order(calls: Rows, waited: Times) -> tuple[Rows, Times]:
    """Calls in the order of their issue, with how long each has waited."""
    order = np.argsort(calls["issue_ns"], kind="stable")
    return calls[order], waited[order]


def ends_of(calls: Rows) -> tuple[Times, Times]:
    """When calls began and ended. One that is not known to have ended lasted as long as it was waited for."""
    begun = arrivals(calls)
    ended = np.where(calls["end_ns"] >= 0, calls["end_ns"], begun + calls["blocked_ns"])
    return begun, np.maximum(ended, begun)


def _blocked_from(calls: Rows, begun: Times, ended: Times, is_own: npt.NDArray[np.bool_]) -> Times:
    """(n,) since when the rank did nothing but wait for the call to end; the call's end where it did other things.

    DDP waits where the recorder does not see it: for the buckets when the last one has been issued, and for others
    at once.
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
        keys = calls["rank"][of_backward].astype(np.int64) << 32 | calls["backward"][of_backward]
        _, back = np.unique(keys, return_inverse=True)
        last_issue = np.zeros(int(back.max()) + 1, np.int64)
        np.maximum.at(last_issue, back, begun[of_backward])
        since[of_backward] = np.minimum(since[of_backward], last_issue[back])
    return since


def _covers(starts: Times, ends: Times, at: Times) -> npt.NDArray[np.bool_]:
    """(n,) whether any of the intervals covers what begins at each of these times."""
    begun = np.searchsorted(np.sort(starts), at, "right")
    return begun > np.searchsorted(np.sort(ends), at, "right")


def samples_of(spans: Rows, edges: Times) -> list[int | None]:
    """By step: those that the loaders gave, or else those that went through the model with the most."""
    count = len(edges) - 1
    for kind in ("input", "forward"):
        rows = spans[(spans["kind"] == SPANS.index(kind)) & (spans["samples"] >= 0)]
        of_step = np.searchsorted(edges, rows["start_ns"], "right") - 1
        inside = (of_step >= 0) & (of_step < count)
        rows, of_step = rows[inside], of_step[inside]
        if not len(rows):
            continue
        sums = [
            np.bincount(of_step[rows["name"] == name], rows["samples"][rows["name"] == name], count)
            for name in np.unique(rows["name"])
        ]
        known = np.bincount(of_step, minlength=count) > 0
        return [int(value) if is_known else None for value, is_known in zip(np.max(sums, axis=0), known, strict=True)]
    return [None] * count


def _buckets(calls: Rows, edges: Times, layouts: _Layouts) -> dict[int, list[Bucket]]:
    """By step, in the order of their issue."""
    calls = calls[(calls["bucket"] >= 0) & (calls["issue_ns"] >= edges[0]) & (calls["issue_ns"] < edges[-1])]
    found: dict[int, list[Bucket]] = {}
    columns = ("rank", "module", "bucket", "nbytes_in", "issue_ns", "end_ns")
    of_step: Numbers = np.searchsorted(edges, calls["issue_ns"], "right") - 1
    for step, row in zip(of_step.tolist(), zip(*(calls[name].tolist() for name in columns), strict=True), strict=True):
        rank, module, bucket, nbytes, issue_ns, end_ns = row
        found.setdefault(step, []).append(
            Bucket(
                bucket=bucket,
                nbytes=nbytes,
                parameters=layouts.parameters(rank, module, bucket, issue_ns),
                issue_ns=issue_ns,
                end_ns=end_ns if end_ns >= 0 else None,
            )
        )
    return found


class _Layouts:
    """How each model had its parameters in buckets, and when."""

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
        """The parameters of a bucket at that time; empty where they are not known."""
        times, layouts = self._known.get((rank, model), ([], []))
        at = bisect.bisect_right(times, issue_ns) - 1
        if at < 0 or bucket >= len(layouts[at]):
            return ()
        return layouts[at][bucket]


def _parse(layout: str) -> list[tuple[str, ...]]:
    """The parameters of each bucket; none where the text is no layout, as in a damaged file."""
    try:
        return [tuple(bucket["parameters"]) for bucket in json.loads(layout)]
    except (ValueError, TypeError, KeyError):
        return []
