"""Findings that hold only for several ranks together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Fact = tuple[int, dict[str, Any]]  # step and details
OfRanks = dict[int, Fact]

_CONSECUTIVE = 3


def compared(facts: Mapping[str, OfRanks]) -> dict[str, OfRanks]:
    """Return the findings that follow from a comparison of ranks.

    Args:
        facts: facts by name and rank.
    """
    found = {}
    if same := same_batches(facts.get("batches", {})):
        found["same-batches"] = same
    if skipped := skipped_batch(facts.get("draws", {})):
        found["skipped-batch"] = skipped
    return found


def same_batches(facts: OfRanks) -> OfRanks:
    """Return the ranks with the same inputs in three consecutive steps, which differ from step to step.

    Example:
        >>> own = {"model": "model", "ranks": [0, 1], "steps": [[1, 7], [2, 8], [3, 9]]}
        >>> same_batches({0: (0, own), 1: (0, own)})[1]
        (1, {'model': 'model', 'last': 3})
        >>> same_batches({0: (0, own), 1: (0, {**own, "steps": [[1, 7], [2, 8], [3, 5]]})})
        {}
    """
    by_run: dict[tuple[Any, ...], list[int]] = {}
    for rank, (_, own) in sorted(facts.items()):
        for first, sums in _runs(own["steps"]):
            by_run.setdefault((first, sums, own["model"], tuple(own["ranks"])), []).append(rank)
    for (first, _, model, group), ranks in sorted(by_run.items()):
        inside = [rank for rank in ranks if rank in group]
        if len(inside) > 1:
            return {rank: (first, {"model": model, "last": first + _CONSECUTIVE - 1}) for rank in inside}
    return {}


def _runs(steps: list[list[int]]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield the first step and the checksums of three consecutive steps with different inputs."""
    for at in range(len(steps) - _CONSECUTIVE + 1):
        some = steps[at : at + _CONSECUTIVE]
        sums = tuple(one for _, one in some)
        if some[-1][0] - some[0][0] == _CONSECUTIVE - 1 and len(set(sums)) == _CONSECUTIVE:
            yield some[0][0], sums


_FEWEST = 2  # consecutive steps with the same distance


def skipped_batch(facts: OfRanks) -> OfRanks:
    """Return the ranks that average gradients of different batches of their loaders, from some step on.

    All ranks must have drawn equally many batches until then, and one batch for each step afterwards. A loop that
    draws as many batches as it needs for a step is left out.

    Example:
        >>> regular = {"ranks": [0, 1], "draws": [[1, 0, 1]], "last": 9}
        >>> skipping = {"ranks": [0, 1], "draws": [[1, 0, 1], [4, 0, 5]], "last": 9}
        >>> skipped_batch({0: (0, regular), 1: (0, skipping)})
        {0: (4, {'batch': 4}), 1: (4, {'batch': 5})}
        >>> skipped_batch({0: (0, regular), 1: (0, regular)})
        {}
    """
    if len(facts) < 2 or len({tuple(own["ranks"]) for _, own in facts.values()}) > 1:
        return {}
    own = {rank: one for rank, (_, one) in facts.items() if rank in one["ranks"]}
    last = min(one["last"] for one in own.values())
    for step in sorted({draw[0] for one in own.values() for draw in one["draws"]}):
        here = _positions(own, step)
        if step + _FEWEST - 1 > last or len({passes for passes, _ in here.values()}) > 1:
            return {}
        if len({count for _, count in here.values()}) > 1:
            is_steady = all(
                _positions(own, step + n) == {rank: (passes, count + n) for rank, (passes, count) in here.items()}
                for n in range(_FEWEST)
            )
            return {rank: (step, {"batch": here[rank][1]}) for rank in sorted(own)} if is_steady else {}
    return {}


def _positions(own: Mapping[int, dict[str, Any]], step: int) -> dict[int, tuple[int, int]]:
    """Return the pass and the number of drawn batches of each rank at a step."""
    return {rank: _position(one["draws"], step) for rank, one in own.items()}


def _position(draws: list[list[int]], step: int) -> tuple[int, int]:
    """Return the pass and the number of drawn batches of a step. Between entries, each step draws one batch."""
    first, passes, count = draws[0]
    for one in draws:
        if one[0] <= step:
            first, passes, count = one
    return passes, count + step - first
