"""Parts of tensors that this rank holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ddp_notebook.stdlib import re

_WRAPPERS = re.compile(r"\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_MOST = 10_000  # maximum number of tensors


def parts_or_error(namespace: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the result of `parts` or its error: `{"parts": [...]}` or `{"error": "..."}`."""
    try:
        return {"parts": parts(namespace, name)}
    except LookupError as error:
        return {"error": str(error.args[0])}


def parts(namespace: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Return the parts of tensors that this rank holds, as plain data.

    Each tensor has its `name`, `dtype`, global `shape`, `placements` and `mesh` (names and sizes), and the `offset`,
    `size` and `nbytes` of its part.

    Args:
        namespace: variables.
        name: name of a model or a tensor, or path to a part of it: "model.blocks.0".

    Raises:
        LookupError: the name does not exist, or is neither a model nor a tensor.

    Example:
        >>> parts({"x": torch.zeros(2, 3)}, "x")[0]["size"]
        [2, 3]
    """
    value = _find(namespace, name)
    if isinstance(value, torch.Tensor):
        return [_part(name, value)]
    if isinstance(value, torch.nn.Module):
        named = list(torch.nn.Module.named_parameters(value))[:_MOST]
        if isinstance(value, torch.nn.parallel.DistributedDataParallel):
            named = [(key.removeprefix("module."), tensor) for key, tensor in named]
        return [_part(_WRAPPERS.sub("", key), tensor) for key, tensor in named]
    raise LookupError(f"placement needs a model or a tensor, but {name} is of type {type(value).__name__}")


def _find(namespace: Mapping[str, Any], name: str) -> Any:
    first, *rest = name.split(".")
    if first not in namespace:
        raise LookupError(f"undefined variable {first!r}")
    value = namespace[first]
    for at, key in enumerate(rest, 1):
        if key.isdigit() and isinstance(value, list | tuple):
            below = value[int(key)] if int(key) < len(value) else None
        else:  # parts of a module may be named by numbers
            below = getattr(value, key, None)
        if below is None:
            raise LookupError(f"{'.'.join([first, *rest[: at - 1]])} has no {key!r}")
        value = below
    return value


def _part(name: str, tensor: torch.Tensor) -> dict[str, Any]:
    shape = list(tensor.shape)
    found = {"name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": shape}
    if not isinstance(tensor, DTensor):
        nbytes = 0 if tensor.device.type == "meta" else tensor.numel() * tensor.element_size()
        return found | {"placements": [], "mesh": [], "offset": [0] * len(shape), "size": shape, "nbytes": nbytes}
    mesh = tensor.device_mesh
    size, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
    local = tensor.to_local()
    return found | {
        "placements": [_word(one) for one in tensor.placements],
        "mesh": [[name, n] for name, n in zip(mesh.mesh_dim_names or [""] * mesh.ndim, mesh.shape, strict=True)],
        "offset": list(offset),
        "size": list(size),
        "nbytes": local.numel() * local.element_size(),
    }


def _word(placement: Any) -> str:
    if placement.is_replicate():
        return "Replicate"
    return "Partial" if placement.is_partial() else f"Shard({placement.dim})"
