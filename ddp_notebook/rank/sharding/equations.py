"""Extend the errors for inconsistent meshes and placements by the numbers that do not match."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch.distributed import get_rank, get_world_size

from ddp_notebook.stdlib import functools

_HOLDERS = (  # modules that contain the functions
    *("torch.distributed", "torch.distributed.device_mesh", "torch.distributed.tensor"),
    *("torch.distributed.fsdp", "torch.distributed.fsdp._fully_shard"),
)


def watch() -> None:
    """Wrap the torch functions that create meshes, DTensors and shards, to extend their errors.

    Raises:
        ImportError, AttributeError: this torch version lacks these functions.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, distribute_tensor

    DTensor.redistribute = _around(DTensor.redistribute, _of_redistribution, _check_count)  # type: ignore[method-assign]
    DTensor.from_local = staticmethod(_around(DTensor.from_local, _of_placements))  # type: ignore[method-assign]
    torch.compiler.allow_in_graph(DTensor.from_local)  # torch.compile recognizes the original by identity
    for original, say in (
        (init_device_mesh, _of_mesh),
        (distribute_tensor, _of_placements),
        (fully_shard, _of_sharding),
    ):
        around = _around(original, say)
        for holder in _HOLDERS:
            module = sys.modules.get(holder)
            if module is not None and module.__dict__.get(original.__name__) is original:
                setattr(module, original.__name__, around)


def _around(
    original: Callable[..., Any], say: Callable[..., str], check: Callable[..., None] | None = None
) -> Callable[..., Any]:
    @functools.wraps(original)
    def function(*args: Any, **named: Any) -> Any:
        if check is not None and not torch.compiler.is_compiling():
            check(*args, **named)
        try:
            return original(*args, **named)
        except (RuntimeError, ValueError, IndexError, AssertionError) as error:
            words = ""
            try:
                words = say(*args, **named)
            except (TypeError, ValueError, AttributeError):  # invalid arguments: keep the error of torch
                raise error from None
            if not words:
                raise
            raise type(error)(f"{words} (torch: {error})") from error  # same class and text, for code that catches it

    return function


def _of_mesh(device_type: str, mesh_shape: Sequence[int], *_: Any, **__: Any) -> str:
    world_size, size = get_world_size(), prod(mesh_shape)
    if size <= world_size:
        return ""
    return (
        f"a mesh of {' * '.join(map(str, mesh_shape))} = {size} ranks != world_size {world_size}: the product of "
        f"its sizes must be {world_size}"
    )


def _of_sharding(_: Any, *, mesh: Any = None, **__: Any) -> str:
    if mesh is None or mesh.get_coordinate() is not None:
        return ""
    world_size, size = get_world_size(), mesh.size()
    return (
        f"rank {get_rank()} is not in the mesh of {' * '.join(map(str, mesh.shape))} = {size} ranks != world_size "
        f"{world_size}: the product of its sizes must be {world_size}, or only its ranks may call fully_shard"
    )


def _of_redistribution(tensor: Any, device_mesh: Any = None, placements: Any = None, *_: Any, **__: Any) -> str:
    return _of_placements(tensor, tensor.device_mesh if device_mesh is None else device_mesh, placements)


def _check_count(tensor: Any, device_mesh: Any = None, placements: Any = None, *_: Any, **__: Any) -> None:
    """Check the number of placements. torch 2.13 accepts any number and then creates an invalid DTensor."""
    mesh = tensor.device_mesh if device_mesh is None else device_mesh
    if isinstance(placements, Sequence) and len(placements) != mesh.ndim:  # torch also accepts an iterator
        raise ValueError(_of_placements(tensor, mesh, placements))


def _of_placements(tensor: Any, device_mesh: Any = None, placements: Any = None, *_: Any, **__: Any) -> str:
    if device_mesh is None or placements is None:
        return ""
    if len(placements) != device_mesh.ndim:
        return (
            f"{len(placements)} placements {list(placements)} != {device_mesh.ndim} dimensions of the mesh "
            f"{tuple(device_mesh.shape)}: pass one placement for each dimension"
        )
    for one in placements:
        if one.is_shard() and not -tensor.ndim <= one.dim < tensor.ndim:
            return (
                f"Shard({one.dim}) of a tensor of shape {tuple(tensor.shape)}: it has {tensor.ndim} dimensions, 0 to "
                f"{tensor.ndim - 1}"
            )
    return ""
