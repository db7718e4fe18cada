"""Effective batch of data parallel training: samples of an optimizer step on all ranks together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ddp_notebook.observe.steps.steps import StepTable
from ddp_notebook.observe.tables.matching import RowSource
from ddp_notebook.observe.tables.ring_buffer import select
from ddp_notebook.records.schema import ORIGINS, SPANS, Rows
from ddp_notebook.records.words import group_by_value, list_ranks

_INPUT = [SPANS.index(kind) for kind in ("input", "workers")]
_FORWARD, _BACKWARD, _OPTIMIZER = map(SPANS.index, ("forward", "backward", "optimizer"))
_PIPELINE = SPANS.index("pipeline")
_FSDP = ORIGINS.index("fsdp")
_MODEL_PARALLEL = [ORIGINS.index(origin) for origin in ("dtensor", "pipeline")]  # such ranks may share a batch
_USUAL = 0.9  # share of the steps of a rank that must have the same batch: the last one of an epoch may be smaller


class Batch(NamedTuple):
    """Batch of one rank in a step."""

    samples: int  # of each micro-step
    micro_steps: int


def effective_batch(recording: RowSource, steps: StepTable, shared: Sequence[Sequence[int]] = ()) -> str:
    """Return the effective batch as a product; "" if it is not certain, or there is only one batch in a step.

    Args:
        recording: the rows of one cell.
        steps: its steps.
        shared: groups of ranks that had the same batches. Each group counts once.

    Example:
        >>> from ddp_notebook.observe.steps.steps import measure
        >>> from tests.observe.synthetic import simulate
        >>> run = simulate(micro_steps=2)
        >>> effective_batch(run, measure(run))
        '32 x 4 ranks x 2 micro-steps = 256'
        >>> effective_batch(run, measure(run), [[0, 1, 2, 3]])
        '32 x 2 micro-steps = 64, because ranks 0-3 had the same batches'
    """
    ranks = steps.ranks
    if not _is_data_parallel(recording, ranks):
        return ""
    spans = recording.rows("span")
    if (spans["kind"] == _PIPELINE).any():
        return ""
    found = {rank: _batch(select(spans, spans["rank"] == rank), steps[steps.rank == rank]) for rank in ranks}
    batches = {rank: batch for rank, batch in found.items() if batch is not None}
    if len(batches) < len(ranks) or len({batch.micro_steps for batch in batches.values()}) != 1:
        return ""
    micro_steps = batches[ranks[0]].micro_steps
    if len(ranks) * micro_steps == 1:
        return ""
    if any(len({batches[rank].samples for rank in group if rank in batches}) > 1 for group in shared):
        return ""
    repeated = {rank for group in shared for rank in group[1:]}
    batches = {rank: batch for rank, batch in batches.items() if rank not in repeated}
    total = micro_steps * sum(batch.samples for batch in batches.values())
    own = _sum_of_ranks(batches, is_factor=micro_steps > 1)
    more = f" x {micro_steps} micro-steps" if micro_steps > 1 else ""
    why = " and ".join(list_ranks(list(group)) for group in shared)
    result = f"{own}{more} = {total}" if len(batches) * micro_steps > 1 else own
    return f"{result}, because {why} had the same batches" if why else result


def _sum_of_ranks(batches: Mapping[int, Batch], *, is_factor: bool) -> str:
    """Return the samples of a micro-step on all ranks, in parentheses if a sum is a factor.

    Example:
        >>> _sum_of_ranks({0: Batch(8, 2), 1: Batch(8, 2)}, is_factor=True)
        '8 x 2 ranks'
        >>> _sum_of_ranks({0: Batch(8, 2), 1: Batch(4, 2)}, is_factor=True)
        '(8 (rank 0) + 4 (rank 1))'
    """
    groups = group_by_value({rank: batch.samples for rank, batch in batches.items()})
    if len(groups) == 1:
        (samples,) = groups
        return f"{samples} x {len(batches)} ranks" if len(batches) > 1 else f"{samples}"
    own = " + ".join(
        f"{samples}{f' x {len(some)}' if len(some) > 1 else ''} ({list_ranks(some)})"
        for samples, some in groups.items()
    )
    return f"({own})" if is_factor else own


def _is_data_parallel(recording: RowSource, ranks: list[int]) -> bool:
    """Return whether each rank certainly has its own batch: DDP or FSDP over all ranks, and no other parallelism."""
    if ranks == [0] and recording.world_size == 1:
        return True
    calls = recording.rows("call")
    if np.isin(calls["origin"], _MODEL_PARALLEL).any():
        return False
    own = select(calls, (calls["bucket"] >= 0) | (calls["origin"] == _FSDP))
    groups = [sorted(recording.group_of(one)["ranks"]) for one in np.unique(own["group"]).tolist()]
    return bool(groups) and all(group == ranks for group in groups)


def _batch(spans: Rows, steps: StepTable) -> Batch | None:
    """Return the batch of most steps of one rank; None if it is unknown, or if steps differ."""
    order = np.argsort(steps.start_ns, kind="stable")
    starts, ends = steps.start_ns[order], steps.end_ns[order]
    at = np.searchsorted(starts, spans["start_ns"], "right") - 1
    inside = (at >= 0) & (spans["start_ns"] < ends[np.maximum(at, 0)])
    spans, at = select(spans, inside), at[inside]
    if len(np.unique(spans["name"][spans["kind"] == _OPTIMIZER])) > 1:  # such as a GAN, with several passes of a batch
        return None
    backwards = np.bincount(at[spans["kind"] == _BACKWARD], minlength=len(starts))
    for kinds in (_INPUT, [_FORWARD]):
        chosen = np.isin(spans["kind"], kinds) & (spans["samples"] > 0)
        names = np.unique(spans["name"][chosen]).tolist()
        if names:
            sums = {name: int(spans["samples"][chosen & (spans["name"] == name)].sum()) for name in names}
            chosen &= spans["name"] == max(sums, key=lambda name: sums[name])
            return _usual(spans["samples"][chosen], at[chosen], backwards, is_input=kinds is _INPUT)
    return None


def _usual(samples: np.ndarray, at: np.ndarray, backwards: np.ndarray, *, is_input: bool) -> Batch | None:
    """Return the batch that most steps have.

    Several batches of a loader, or several forward passes, are micro-steps if each has a backward pass.

    Args:
        samples: (n,) samples of each batch or forward.
        at: (n,) the step of each.
        backwards: number of backward passes by step.
    """
    count = np.bincount(at, minlength=len(backwards))
    total = np.bincount(at, samples, len(backwards)).astype(np.int64)
    most = np.zeros(len(backwards), np.int64)
    np.maximum.at(most, at, samples)
    is_even = (count > 0) & (total == count * most)
    is_clear = is_even & ((count == backwards) | ((count == 1) & is_input))
    kinds, counts = np.unique(np.stack([most, count], axis=1)[is_clear], axis=0, return_counts=True)
    if not len(kinds) or counts.max() < _USUAL * len(backwards):
        return None
    samples_of_one, micro_steps = kinds[counts.argmax()].tolist()
    return Batch(samples_of_one, micro_steps)
