"""Models whose forward needs all ranks: FSDP and tensor parallel. Ranks agree before they stop and repeat a forward."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ddp_notebook.rank.record.nan.last_forward import KeptForward


def mesh_groups(parameters: Iterable[torch.Tensor]) -> list[Any]:
    """Return the groups along the dimensions of the largest mesh of these parameters; [] without DTensors."""
    meshes = [one.device_mesh for one in parameters if hasattr(one, "device_mesh")]
    if not meshes:
        return []
    mesh = max(meshes, key=lambda one: one.ndim)
    return [mesh.get_group(dim) for dim in range(mesh.ndim) if mesh.size(dim) > 1]


def groups_of(kept: KeptForward) -> list[Any]:
    """Return the groups of the ranks that a forward needs; [] if this rank can repeat it alone."""
    groups = mesh_groups(kept.parameters)
    wrappers = _wrappers(kept.module)
    return groups or [one.process_group for one in wrappers[:1] if dist.get_world_size(one.process_group) > 1]


def smallest(values: Sequence[float], groups: Sequence[Any], device: torch.device) -> list[float]:
    """Return the smallest value of all ranks at each place. All ranks of the groups call it."""
    shared = torch.tensor(values, dtype=torch.float32, device=device)
    for group in groups:
        dist.all_reduce(shared, dist.ReduceOp.MIN, group=group)
    return [float(one) for one in shared.tolist()]


def obstacle(kept: KeptForward) -> str:
    """Return why ranks cannot repeat a forward together; "" if they can."""
    if any(getattr(one, "_post_accumulate_grad_hooks", None) for one in kept.parameters):
        return "parameters have hooks that run in the backward, such as an optimizer step"
    if any(one.sharding_strategy.name.startswith(("HYBRID", "_HYBRID")) for one in _wrappers(kept.module)):
        return "FullyShardedDataParallel with a hybrid strategy cannot be repeated: use fully_shard"
    return kept.changed()


def _wrappers(module: torch.nn.Module) -> list[Any]:
    """Return the modules of `FullyShardedDataParallel`."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    return [one for one in module.modules() if isinstance(one, kind)]


class GradientsAside:
    """The gradients of a sharded model, which the backward of FSDP adds to.

    Args:
        kept: the forward that all ranks repeat.
    """

    def __init__(self, kept: KeptForward) -> None:
        modules = list(kept.module.modules())
        self._parameters = list(kept.module.parameters())
        self._flat = [one._handle.flat_param for one in _wrappers(kept.module) if one._handle is not None]
        self.is_needed = bool(self._flat) or any(
            kind.__name__ == "FSDPModule" for one in modules for kind in type(one).__mro__
        )
        self._kept: list[tuple[Any, str, Any]] = []

    def put_aside(self) -> None:
        """Let the parameters have no gradients."""
        if not self._kept:
            self._kept = [(one, name, getattr(one, name)) for one, name in self._places()]
        for one, name, _ in self._kept:
            setattr(one, name, None)

    def restore(self) -> None:
        """Give the gradients back. It may be called again."""
        for one, name, gradient in self._kept:
            setattr(one, name, gradient)

    def _places(self) -> Iterator[tuple[Any, str]]:
        for one in self._parameters:
            yield one, "grad"
        for flat in self._flat:
            yield flat, "grad"
            for part in flat._params or ():
                yield part, "grad"
            for name in ("_saved_grad_shard", "_cpu_grad"):
                if hasattr(flat, name):
                    yield flat, name
