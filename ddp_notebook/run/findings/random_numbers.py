"""Comparison of the ranks' random numbers in the first training step of a cell, see `rank/findings/random_draws`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ddp_notebook.records.words import list_ranks

OfRanks = dict[int, tuple[int, dict[str, Any]]]  # step and details by rank

_GENERATORS = {
    "torch": "the generator of torch",
    "CUDA": "the generator of the GPU",
    "Python": "the random module",
    "NumPy": "NumPy",
}
_SEEDS = {
    "torch": "torch.manual_seed(seed + rank)",
    "CUDA": "torch.cuda.manual_seed(seed + rank)",
    "Python": "random.seed(seed + rank)",
    "NumPy": "numpy.random.seed(seed + rank)",
}


def same_draws(facts: OfRanks) -> tuple[str, ...]:
    """Return sentences about data parallel ranks with different batches that have drawn the same random numbers.

    Args:
        facts: the fact "random" of each rank.

    Example:
        >>> def of(batch, state):
        ...     states = {"torch": [state, True], "Python": [3, False]}
        ...     return 0, {"model": "model", "ranks": [0, 1], "inputs": batch, "drops": True, "forward": states}
        >>> print(*same_draws({0: of(5, 7), 1: of(6, 7)}))  # doctest: +ELLIPSIS
        Ranks 0,1 drew the same random numbers in the first forward of model, which has dropout, for different ...
        >>> same_draws({0: of(5, 7), 1: of(6, 8)}), same_draws({0: of(5, 7), 1: of(5, 7)})
        ((), ())
    """
    return (*_in_fetch(facts), *_in_forward(facts))


def _in_fetch(facts: OfRanks) -> Iterator[str]:
    for generator, ranks in _equal(facts, "fetch", "batch"):
        seeds = facts[ranks[0]][1].get("seeds")  # the generator of the workers' seeds; None: no workers
        where = "" if seeds is None else " in the first worker of the data loader"
        if seeds == "program":
            call = "use the rank in the generator or the worker_init_fn of the loader"
        else:
            call = f"call {_SEEDS[seeds or generator]} before the loop"
        yield (
            f"{_ranks(ranks)} drew the same random numbers while they loaded their first batches, which differ: "
            f"{_GENERATORS[generator]} had the same state{where}. If each rank needs its own random transforms, {call}"
        )


def _in_forward(facts: OfRanks) -> Iterator[str]:
    for generator, ranks in _equal(facts, "forward", "inputs"):
        one = facts[ranks[0]][1]
        has_dropout = ", which has dropout," if one["drops"] else ""
        yield (
            f"{_ranks(ranks)} drew the same random numbers in the first forward of {one['model']}{has_dropout} for "
            f"different inputs: {_GENERATORS[generator]} had the same state. If each rank needs its own, call "
            f"{_SEEDS[generator]} after the model is made"
        )


def _ranks(ranks: list[int]) -> str:
    text = list_ranks(ranks)
    return f"{text[:1].upper()}{text[1:]}"


def _equal(facts: OfRanks, part: str, data: str) -> Iterator[tuple[str, list[int]]]:
    """Yield generators from which ranks with different data have drawn the same numbers, and these ranks.

    Args:
        facts: the fact "random" of each rank.
        part: the part that has drawn: "fetch" or "forward".
        data: name of the checksum that must be known, and differ between the ranks. Inputs on a GPU have none, so the
            batch of the loader counts for them.
    """
    by_state: dict[tuple[str, int, tuple[int, ...]], dict[int, int]] = {}
    for rank, (_, own) in sorted(facts.items()):
        checksum = own.get(data) or own.get("batch")
        if rank not in own["ranks"] or not checksum:
            continue
        for generator, (state, is_drawn) in (own.get(part) or {}).items():
            if is_drawn:
                by_state.setdefault((generator, state, tuple(own["ranks"])), {})[rank] = checksum
    for (generator, _, _), checksums in by_state.items():
        if len(checksums) > 1 and len(set(checksums.values())) == len(checksums):
            yield generator, list(checksums)


def mixed_samplers(facts: OfRanks) -> OfRanks:
    """Return the ranks whose parts of the data come from different orders, because their samplers differ.

    Example:
        >>> def of(rank, seed): return 0, {"model": "m", "ranks": [0, 1], "sampler": [2, rank, 64, seed, 0]}
        >>> mixed_samplers({0: of(0, 5), 1: of(1, 6)})[1]
        (1, {'what': 'seed', 'value': 6})
        >>> mixed_samplers({0: of(0, 5), 1: of(1, 5)})
        {}
    """
    samplers: Mapping[int, list[Any]] = {
        rank: own["sampler"] for rank, (_, own) in sorted(facts.items()) if own.get("sampler") and rank in own["ranks"]
    }
    if len(samplers) < 2 or len({(replicas, length) for replicas, _, length, _, _ in samplers.values()}) > 1:
        return {}
    if len({rank for _, rank, *_ in samplers.values()}) < len(samplers):
        return {}
    for at, what in ((3, "seed"), (4, "epoch")):
        if len({one[at] for one in samplers.values()}) > 1:
            return {rank: (1, {"what": what, "value": one[at]}) for rank, one in samplers.items()}
    return {}
