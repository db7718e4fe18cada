"""Models that are in DDP twice, as after a cell with `model = DDP(model)` that has run a second time."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ddp_notebook.rank.sharding.wrapping import after

_WRONG = (
    "is in DDP twice: each step averages its gradients twice, and names in its state_dict() begin with module.module."
)


def watch() -> None:
    """Say in a cell that a model is put into DDP a second time."""
    after(DistributedDataParallel, "__init__", _look)


def of_models(namespace: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each variable whose model is in DDP twice.

    Args:
        namespace: the variables.
    """
    twice = [name for name, model in namespace.items() if _is_twice(model)]
    return [f"{name} {_WRONG} {name} = {name}.module undoes one of them" for name in twice]


def _is_twice(model: Any) -> bool:
    return type(model) is DistributedDataParallel and type(model.module) is DistributedDataParallel


def _look(_: Any, module: torch.nn.Module | None = None, *__: Any, **___: Any) -> None:
    if isinstance(module, DistributedDataParallel):
        print(
            f"ddp_notebook: this model {_WRONG} If the cell has run before, make the model in the same cell, or wrap "
            "the inner one: DDP(model.module)",
            file=sys.stderr,
        )
