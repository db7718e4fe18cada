"""Models and tensors that are asked for what only sharded ones have."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.distributed import get_world_size, is_initialized

from ddp_notebook.records.units import size


def of_error(error: BaseException) -> str:
    """What an AttributeError comes of, where FSDP would have given a model that method, or DTensor a tensor; else "".

    Example:
        >>> import torch.distributed.fsdp
        >>> try:
        ...     torch.nn.Linear(4, 4).unshard()
        ... except AttributeError as missing:
        ...     print(of_error(missing))
        this Linear is not sharded: call fully_shard on it first, which gives it unshard
    """
    if type(error) is not AttributeError or type(error.name) is not str:
        return ""
    found: Any = error.obj
    name = error.name
    if issubclass(type(found), torch.nn.Module) and _has("torch.distributed.fsdp", "FSDPModule", name):
        return _of_model(found, name)
    if issubclass(type(found), torch.Tensor) and _has("torch.distributed.tensor", "DTensor", name):
        return (
            f"this tensor of shape {tuple(found.shape)} is not sharded: it is no DTensor, so use it as it is, or call "
            "distribute_tensor on it first"
        )
    return ""


def _has(module: str, kind: str, name: str) -> bool:
    """Whether a class of torch has this public method by itself. Nobody has a sharded model who has not imported it."""
    return not name.startswith("_") and name in vars(getattr(sys.modules.get(module), kind, object))


def _of_model(model: Any, name: str) -> str:
    parameters, kind = list(torch.nn.Module.parameters(model)), type(model).__name__
    if any(hasattr(one, "placements") for one in parameters):
        return (
            f"this {kind} was not given to fully_shard, though its parameters are DTensors: call {name} on a model "
            f"that was, or call fully_shard on this {kind} as well, before that"
        )
    if any(hasattr(one, "_is_flat_param") for one in parameters):  # FSDP1, which has no such methods
        return ""
    whole = sum(one.nbytes for one in parameters)
    ranks = get_world_size() if is_initialized() else 0
    equation = f"{ranks} ranks * {size(whole)} = {size(ranks * whole)}; " if ranks and whole else ""
    return f"this {kind} is not sharded: {equation}call fully_shard on it first, which gives it {name}"
