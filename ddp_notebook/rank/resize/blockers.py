"""What is in the way of more or fewer ranks: whatever has a part of itself on each rank would lose those of the ranks
that leave, and has none for those that come.

Nothing here waits for another rank, or changes anything.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Set
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from ddp_notebook.stdlib import gc


class ResizeBlockers:
    """Of one rank, as they are now.

    Args:
        namespace: the user's variables.

    Attributes:
        sharded: names of models, of their optimizers and of device meshes, each with what it is: a function that builds
            them anew helps.
        others: sentences about what no such function helps with.

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
            self.others.append(f"some object holds a model in shards ({kinds}) that no variable is: del that object")
        if _rpc_runs():
            self.others.append("RPC runs between the ranks, whose names and RRefs are of these: call rpc.shutdown()")

    def _note(self, name: str, value: Any, sharded_parameters: Set[int]) -> None:
        """Note a variable that is no module, if it is an obstacle.

        Args:
            sharded_parameters: the ids of the parameters of models in shards.
        """
        if _is(value, "torch.distributed.optim", "ZeroRedundancyOptimizer"):
            self.others.append(f"{name} is a ZeroRedundancyOptimizer, whose state is spread over the ranks")
        elif issubclass(type(value), torch.optim.Optimizer):
            its = [p for group in value.param_groups for p in group["params"]]
            if any(id(p) in sharded_parameters or _is_dtensor(p) for p in its):
                self.sharded[name] = f"a {type(value).__name__} of parameters in shards"
        elif _is(value, "torch.distributed.device_mesh", "DeviceMesh"):
            self.sharded[name] = "a device mesh"
        elif _is_dtensor(value):
            self.others.append(f"{name} is a DTensor: keep {name}.full_tensor() in its place")
        elif _is(value, "torch.distributed.pipelining.stage", "_PipelineStageBase"):
            self.others.append(f"{name} is a stage of a pipeline, and each rank has another one: del {name}")


def _sharded_modules() -> list[torch.nn.Module]:
    """Modules that FSDP has wrapped or sharded, and those with parameters that are distributed tensors."""
    found = [module for module in gc.get_objects() if _is_sharded(module)]
    if found:  # what nobody holds any more does not count
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
    """Variables, and what lists, tuples and dicts among them hold."""
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
    """Whether a value is of a class of a module, which has to be imported for that."""
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
    except RuntimeError:  # it was not begun, or has ended
        return False
    return True
