"""What is in shards: gathered while the ranks are as many as it was made for, and scattered over as many as there are
then, into what a function of the user's builds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

_gathered: dict[str, Any] = {}  # by name of the variable; on rank 0 the whole state


class CannotBuildError(Exception):
    """What is in shards cannot be had again: says why, and what to do."""

    def _render_traceback_(self) -> list[str]:  # its frames are ours, below a line that no user has written
        return [f"{type(self).__name__}: {self}"]


def gather(namespace: Mapping[str, Any], build: str, names: Sequence[str]) -> None:
    """Bring models and their optimizers together, in the memory of rank 0's host. Nothing else is changed.

    Args:
        namespace: the user's variables.
        build: name of the function that is to build them anew.
        names: of what is in shards.

    Raises:
        CannotBuildError: there is no such function, or no model of an optimizer.
    """
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
    )

    if not callable(namespace.get(build)):
        raise CannotBuildError(f"there is no function {build} on this rank; define it in a cell for all ranks")
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
    """Call the function and load what was gathered into what it returns, which takes the place of the variables.

    Raises:
        CannotBuildError: it does not return all that was gathered.
    """
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        set_model_state_dict,
        set_optimizer_state_dict,
    )

    made = namespace[name]()
    if not isinstance(made, Mapping):
        raise CannotBuildError(
            f"{name}() returned a {type(made).__name__}, not its variables by names; let it end with: "
            'return {"model": model, "optimizer": optimizer}'
        )
    shared: list[Any] = [list(_gathered)]
    dist.broadcast_object_list(shared, 0)
    if missing := [one for one in shared[0] if one not in made]:
        raise CannotBuildError(f"{name}() did not return {', '.join(missing)}, which was in shards: add it to the dict")
    whole = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    for one in shared[0]:  # models first: optimizers need them as they will be
        if isinstance(made[one], torch.nn.Module):
            set_model_state_dict(made[one], _gathered.get(one) or {}, options=whole)
    for one in shared[0]:
        if isinstance(made[one], torch.optim.Optimizer):
            model = _model_of(made[one], made)
            set_optimizer_state_dict(model, made[one], _gathered.get(one) or {}, options=whole)
    namespace.update(made)
    _gathered.clear()


def _model_of(optimizer: torch.optim.Optimizer, variables: Mapping[str, Any]) -> torch.nn.Module:
    """The model whose parameters an optimizer has."""
    its = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for value in variables.values():
        if isinstance(value, torch.nn.Module) and its <= {id(p) for p in value.parameters()}:
            return value
    raise CannotBuildError(f"a {type(optimizer).__name__} has parameters of no model among the variables in shards")
