"""Gather sharded objects before a resize, and shard them over the new number of ranks after it.

A function of the user builds the new objects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

_gathered: dict[str, Any] = {}  # variable name -> complete state, on rank 0


class CannotBuildError(Exception):
    """Sharded objects cannot be built again. The message contains the reason and a remedy."""

    def _render_traceback_(self) -> list[str]:  # omit internal frames
        return [f"{type(self).__name__}: {self}"]


def gather(namespace: Mapping[str, Any], build: str, names: Sequence[str]) -> None:
    """Gather models and their optimizers in the memory of rank 0's host. Nothing else is changed.

    Args:
        namespace: variables of the user.
        build: name of the function that will build them again.
        names: names of the sharded objects.

    Raises:
        CannotBuildError: the function does not exist, or the model of an optimizer is missing.
    """
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
    )

    if not callable(namespace.get(build)):
        raise CannotBuildError(f"the function {build} is not defined on this rank; define it in a cell on all ranks")
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    found: dict[str, Any] = {}
    for name in names:
        value = namespace[name]
        if isinstance(value, torch.nn.Module):
            found[name] = get_model_state_dict(value, options=whole)
        elif isinstance(value, torch.optim.Optimizer):
            model = _model_of(value, {one: namespace[one] for one in names})
            found[name] = get_optimizer_state_dict(model, value, options=whole)
        else:
            found[name] = None  # a mesh has no state
    _gathered.clear()
    _gathered.update(found)


def build(namespace: dict[str, Any], name: str) -> None:
    """Call the user's function, load the gathered state into its results, and replace the variables.

    Raises:
        CannotBuildError: the function does not return all gathered objects.
    """
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        set_model_state_dict,
        set_optimizer_state_dict,
    )

    made = namespace[name]()
    if not isinstance(made, Mapping):
        raise CannotBuildError(
            f"{name}() must return a dict of variables, got a {type(made).__name__}; end it with: "
            'return {"model": model, "optimizer": optimizer}'
        )
    shared: list[Any] = [list(_gathered)]
    dist.broadcast_object_list(shared, 0)
    if missing := [one for one in shared[0] if one not in made]:
        raise CannotBuildError(f"{name}() did not return {', '.join(missing)}, which was sharded: add it to the dict")
    whole = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    for one in shared[0]:  # models first: optimizers need their final parameters
        if isinstance(made[one], torch.nn.Module):
            set_model_state_dict(made[one], _gathered.get(one) or {}, options=whole)
    for one in shared[0]:
        if isinstance(made[one], torch.optim.Optimizer):
            model = _model_of(made[one], made)
            set_optimizer_state_dict(model, made[one], _gathered.get(one) or {}, options=whole)
    namespace.update(made)
    _gathered.clear()


def _model_of(optimizer: torch.optim.Optimizer, variables: Mapping[str, Any]) -> torch.nn.Module:
    """Return the model whose parameters an optimizer holds."""
    its = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for value in variables.values():
        if isinstance(value, torch.nn.Module) and its <= {id(p) for p in value.parameters()}:
            return value
    raise CannotBuildError(f"the parameters of a {type(optimizer).__name__} do not belong to any of the sharded models")
