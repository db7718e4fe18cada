"""Parameters of a simulation: the duration of each part of a step, and the model whose gradients are synchronised."""

from __future__ import annotations

from typing import Any, NamedTuple

BUCKETS = 6
STEP_MS = 41.0  # approximate duration of a step without a slow rank
MODEL, LOADER, OPTIMIZER = "DistributedDataParallel(Transformer)", "DataLoader", "AdamW"
_WIDTH, _LAYERS, _VOCABULARY, _CONTEXT = 512, 6, 96, 256  # a transformer with 19 M parameters
_SUMS_EVERY, _MESSAGES_EVERY = 10, 25  # steps between two all_reduce calls of the cell, and between two messages


class Shape(NamedTuple):
    """Parameters of a simulation. See `simulate`."""

    world_size: int
    steps: int | None  # None: unlimited
    seed: int
    straggler: int | None
    slow_from: int  # the first step of the second cell
    scale: float  # factor for all durations
    nan_at: tuple[int, int] | None  # a rank, and a step
    values: bool
    course: float  # steps in which the loss falls by a factor of e


def has_sum(step: int) -> bool:
    """Return whether the cell calls all_reduce after this step of the training run."""
    return step % _SUMS_EVERY == _SUMS_EVERY - 1


def has_messages(step: int, world_size: int) -> bool:
    """Return whether each rank sends to the next one after this step of the training run."""
    return step % _MESSAGES_EVERY == _MESSAGES_EVERY - 1 and world_size > 1


def layout() -> list[dict[str, Any]]:
    """Return the parameters of a transformer in buckets, the last layer first, as in DDP.

    Example:
        >>> [round(bucket["nbytes"] / 1e6) for bucket in layout()]
        [13, 13, 13, 13, 13, 13]
    """
    sizes = {"token.weight": _VOCABULARY * _WIDTH, "position.weight": _CONTEXT * _WIDTH}
    for block in range(_LAYERS):
        for name, numel in (
            ("norm1.weight", _WIDTH),
            ("attention.qkv.weight", 3 * _WIDTH**2),
            ("attention.out.weight", _WIDTH**2),
            ("norm2.weight", _WIDTH),
            ("mlp.up.weight", 4 * _WIDTH**2),
            ("mlp.down.weight", 4 * _WIDTH**2),
        ):
            sizes[f"blocks.{block}.{name}"] = numel
    sizes |= {"norm.weight": _WIDTH, "head.weight": _VOCABULARY * _WIDTH}
    buckets: list[dict[str, Any]] = [{"nbytes": 0, "parameters": []}]
    most = 4 * sum(sizes.values()) / BUCKETS
    for name, numel in reversed(sizes.items()):
        if buckets[-1]["nbytes"] + 2 * numel > most and len(buckets) < BUCKETS:
            buckets.append({"nbytes": 0, "parameters": []})
        buckets[-1]["nbytes"] += 4 * numel
        buckets[-1]["parameters"].append(name)
    return buckets
