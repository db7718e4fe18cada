"""Obstacles to a resize.

An object with a part on each rank would lose the parts of leaving ranks, and new ranks would have none.

This module never waits for another rank and changes nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Set
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from ddp_notebook.stdlib import gc


class ResizeBlockers:
    """Current obstacles on one rank.

    Args:
        namespace: variables of the user.

    Attributes:
        sharded: names and descriptions of sharded models, their optimizers and device meshes. A function that builds
            them again removes these obstacles.
        others: sentences about obstacles that such a function does not remove.

    Example:
        >>> found = ResizeBlockers({"x": 1})
        >>> found.sharded, found.others
        ({}, [])
    """

    def __init__(self, namespace: Mapping[str, Any]) -> None:
        self.sharded: dict[str, str] = {}
        self.others: list[str] = []
        modules = {id(module): module for module in _sharded_modules()}
        parameters = {id(p) for module in modules.values() for p in module.parameters(recurse=False)}
        seen: set[int] = set()
        for name, value in _held(namespace):
            if issubclass(type(value), torch.nn.Module):
                inside = {id(module) for module in torch.nn.Module.modules(value)}
                if inside & modules.keys():
                    seen |= inside
                    self.sharded[name] = f"a {type(value).__name__} in shards"
            else:
                self._note(name, value, parameters)
        if hidden := [type(module).__name__ for key, module in modules.items() if key not in seen]:
            kinds = ", ".join(dict.fromkeys(hidden))
            self.others.append(f"an object that is not a variable holds a sharded model ({kinds}): delete that object")
        if _rpc_runs():
            self.others.append("RPC runs, and its workers and RRefs belong to the present ranks: call rpc.shutdown()")

    def _note(self, name: str, value: Any, sharded_parameters: Set[int]) -> None:
        """Add a variable that is not a module, if it is an obstacle.

        Args:
            name: name of the variable.
            value: its value.
            sharded_parameters: ids of the parameters of sharded models.
        """
        if _is(value, "torch.distributed.optim", "ZeroRedundancyOptimizer"):
            self.others.append(f"{name} is a ZeroRedundancyOptimizer, whose state is spread over the ranks")
        elif issubclass(type(value), torch.optim.Optimizer):
            its = [p for group in value.param_groups for p in group["params"]]
            if any(id(p) in sharded_parameters or _is_dtensor(p) for p in its):
                self.sharded[name] = f"a {type(value).__name__} of sharded parameters"
        elif _is(value, "torch.distributed.device_mesh", "DeviceMesh"):
            self.sharded[name] = "a device mesh"
        elif _is_dtensor(value):
            self.others.append(f"{name} is a DTensor: keep {name}.full_tensor() instead")
        elif _is(value, "torch.distributed.pipelining.stage", "_PipelineStageBase"):
            self.others.append(f"{name} is a pipeline stage, which differs between ranks: del {name}")


def _sharded_modules() -> list[torch.nn.Module]:
    """Return modules that FSDP has wrapped or sharded, and modules with DTensor parameters."""
    found = [module for module in gc.get_objects() if _is_sharded(module)]
    if found:  # unreferenced modules do not count
        found.clear()
        gc.collect()
        found = [module for module in gc.get_objects() if _is_sharded(module)]
    return found


def _is_sharded(value: Any) -> bool:
    kind = type(value)
    if not issubclass(kind, torch.nn.Module):
        return False
    if issubclass(kind, FSDPModule | FullyShardedDataParallel):
        return True
    return any(_is_dtensor(one) for one in (value.__dict__.get("_parameters") or {}).values())


def _held(namespace: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield variables, and the elements of lists, tuples and dicts among them."""
    for name, value in list(namespace.items()):
        if name.startswith("_"):
            continue
        if type(value) in (list, tuple):
            yield from ((f"{name}[{i}]", one) for i, one in enumerate(value[:1000]))
        elif type(value) is dict:
            yield from ((f"{name}[{key!r}]", one) for key, one in list(value.items())[:1000])
        else:
            yield name, value


def _is(value: Any, module: str, name: str) -> bool:
    """Return whether a value has a class of a module, without importing the module."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and issubclass(type(value), kind)


def _is_dtensor(value: Any) -> bool:
    return _is(value, "torch.distributed.tensor", "DTensor")


def _rpc_runs() -> bool:
    rpc = sys.modules.get("torch.distributed.rpc")
    if rpc is None or not hasattr(rpc, "get_worker_info"):
        return False
    try:
        rpc.get_worker_info()
    except RuntimeError:  # RPC was not started, or has ended
        return False
    return True
