"""Purpose of the collectives called by parallel libraries of torch."""

from __future__ import annotations

from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401

_MEANINGS = {  # origin -> prefix of the operation name -> purpose
    "ddp": {"all_reduce": "mean of gradients", "broadcast": "parameters or buffers of rank 0"},
    "fsdp": {
        "all_gather": "all-gather of parameters",
        "reduce_scatter": "reduce-scatter of gradients",
        "all_reduce": "sum of gradients over replicas",
    },
    "dtensor": {
        "all_gather": "redistribution: shards to a whole",
        "reduce_scatter": "redistribution: partial sums to shards",
        "all_reduce": "redistribution: partial sums to a whole",
        "all_to_all": "redistribution: shards to shards of another dimension",
        "scatter": "redistribution: a whole to shards",
        "broadcast": "redistribution: a whole to all ranks",
    },
    "optimizer": {"broadcast": "parameters that one rank has updated"},
    "checkpoint": dict.fromkeys(("gather", "all_gather", "scatter", "broadcast"), "plan of a checkpoint"),
}


def meaning(origin: str, op: str) -> str:
    """Describe the purpose of a collective; "" if it is unknown.

    Args:
        origin: library that called it, one of `schema.ORIGINS`.
        op: name of the operation.

    Example:
        >>> meaning("fsdp", "all_gather_single"), meaning("user", "all_reduce")
        ('all-gather of parameters', '')
    """
    found = (words for start, words in _MEANINGS.get(origin, {}).items() if op.startswith(start))
    return next(found, "")
