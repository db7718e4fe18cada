"""Parameters that an optimizer trains together with a DDP model, and whose gradients DDP does not average."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from ddp_notebook.rank.findings.optimizer_parameters import (
    OptimizerParameters,
    model_name,
    names_of,
    ranks_of,
    variable_of,
)
from ddp_notebook.rank.findings.tensor_checks import checksum, sample
from ddp_notebook.stdlib import weakref

_MOST = 16
_NUMBERS = 16  # elements of communication that only reports the progress of training


class _Outside:
    """A parameter that DDP does not average.

    Args:
        parameter: the parameter, before the step.
        is_inside: the DDP model contains it, but did not contain it, or not as a trained one, when it was made.
    """

    def __init__(self, parameter: torch.Tensor, is_inside: bool) -> None:
        self.reference = weakref.ref(parameter)
        self.is_inside = is_inside
        self.first = _checksum(parameter)


class OutsideParameters:
    """Parameters that one optimizer trains in the running cell together with those of a DDP model.

    The notebook compares their values on the ranks before the first step and after the last one.

    Args:
        held: the parameters of the optimizer.
        model: the DDP model that ran backward.
        averaged: ids of the parameters that DDP models average or ignore.
        is_alone: each backward of the cell has used the DDP model, so gradients of other parameters belong to it.
    """

    def __init__(self, held: OptimizerParameters, model: Any, averaged: Collection[int], *, is_alone: bool) -> None:
        self._held = held
        self._model = weakref.ref(model)
        own = {id(p) for p in model.module.parameters()}
        self.found: list[_Outside] = []
        for p in held.parameters:
            is_inside = id(p) in own
            is_known = id(p) in averaged or p.grad is None or not p.is_cpu or hasattr(p, "placements")
            if not is_known and (is_inside or is_alone) and len(self.found) < _MOST:
                self.found.append(_Outside(p, is_inside))

    def facts(self, namespace: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return what the notebook compares; None if communication may have averaged the gradients.

        Args:
            namespace: variables of the user.
        """
        model: Any = self._model()
        some = [(one, p) for one in self.found if (p := one.reference()) is not None]
        moved = self._held.moved
        if model is None or not some or moved >= min(_NUMBERS, sum(p.numel() for _, p in some)):
            return None
        values = [[_name(p, namespace, model), one.is_inside, one.first, _checksum(p)] for one, p in some]
        return {"model": model_name(model, namespace), "ranks": ranks_of(model), "values": values}


def _name(parameter: torch.Tensor, namespace: Mapping[str, Any], model: Any) -> str:
    """Return the variable of a parameter, or its name in the DDP model, or in a module that is a variable."""
    name = variable_of(parameter, namespace)
    if name != type(parameter).__name__:
        return name
    for inside, one in model.module.named_parameters():
        if one is parameter:
            return str(inside)
    for variable, module in list(namespace.items()):
        if issubclass(type(module), torch.nn.Module):
            for inside, one in module.named_parameters():
                if one is parameter:
                    return f"{variable}.{inside}"
    return names_of([parameter], {}, [])[0]


def _checksum(parameter: torch.Tensor) -> int | None:
    return checksum([sample(parameter.detach()).reshape(-1).repeat(2)])  # repeated, because it ignores single numbers


def has_unreduced_gradients(group: Any) -> bool:
    """Return whether FSDP keeps gradients of a backward that it has not reduced.

    Args:
        group: one of FSDP's groups of parameters, or None.
    """
    for one in getattr(group, "fsdp_params", ()):
        whole = getattr(one, "_unsharded_param", None)
        if getattr(whole, "grad", None) is not None or getattr(one, "unsharded_accumulated_grad", None) is not None:
            return True
    return False
