"""Detection of silent mistakes: training continues, but learns nothing or something else.

A rank detects some of them alone. For others, the notebook compares facts of all ranks
(`run/consistency/disagreements`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed import get_world_size, is_initialized
from torch.nn.parallel import DistributedDataParallel

from ddp_notebook.rank.group.modules import ROOT, Modules
from ddp_notebook.rank.group.recorder import Recorder
from ddp_notebook.rank.sharding.last_steps import LastSteps
from ddp_notebook.rank.sharding.observed_functions import after
from ddp_notebook.rank.sharding.replicas import Replicas
from ddp_notebook.rank.sharding.saves import Saves
from ddp_notebook.rank.sharding.scaling import Scaling
from ddp_notebook.rank.variables.owners import is_in_a_module
from ddp_notebook.records.units import size
from ddp_notebook.stdlib import contextlib


def explain_unsharded(error: BaseException) -> str:
    """Explain an AttributeError if FSDP or DTensor has the missing method; otherwise return "".

    Example:
        >>> import torch.distributed.fsdp
        >>> try:
        ...     torch.nn.Linear(4, 4).unshard()
        ... except AttributeError as missing:
        ...     print(explain_unsharded(missing))
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
            f"this tensor of shape {tuple(found.shape)} is a plain tensor, not a DTensor: use it directly, or call "
            "distribute_tensor on it first"
        )
    return ""


def _has(module: str, kind: str, name: str) -> bool:
    """Return whether a torch class defines this public method. False if its module is not imported."""
    return not name.startswith("_") and name in vars(getattr(sys.modules.get(module), kind, object))


def _of_model(model: Any, name: str) -> str:
    parameters, kind = list(torch.nn.Module.parameters(model)), type(model).__name__
    if any(hasattr(one, "placements") for one in parameters):
        return (
            f"fully_shard was not called on this {kind}, although its parameters are DTensors: call {name} on a model "
            f"that was passed to fully_shard, or call fully_shard on this {kind} first"
        )
    if any(hasattr(one, "_is_flat_param") for one in parameters):  # FSDP1 has no such methods
        return ""
    whole = sum(one.nbytes for one in parameters)
    ranks = get_world_size() if is_initialized() else 0
    equation = f"{ranks} ranks * {size(whole)} = {size(ranks * whole)}; " if ranks and whole else ""
    return f"this {kind} is not sharded: {equation}call fully_shard on it first, which gives it {name}"


def of_optimizers(namespace: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return a sentence for each optimizer that holds parameters from before its model was sharded, with the names of
    the optimizer and its models.

    `fully_shard` and `parallelize_module` replace the parameters of a model, so steps of such an optimizer change
    nothing. An optimizer is only reported if no module of this process has its parameters, and a sharded model has
    parameters of these shapes.

    Example:
        >>> model = torch.nn.Linear(2, 2)
        >>> of_optimizers({"model": model, "optimizer": torch.optim.SGD(model.parameters())})
        {}
    """
    own = {name: value for name, value in namespace.items() if not name.startswith("_")}
    models = {name: one for name, one in own.items() if issubclass(type(one), torch.nn.Module)}
    from_models = [(name, p) for name, model in models.items() for p in torch.nn.Module.parameters(model)]
    held = {id(p) for _, p in from_models}
    sharded = [(name, p.shape) for name, p in from_models if hasattr(p, "placements")]
    found: dict[str, list[str]] = {}
    if not sharded:
        return found
    for name, optimizer in own.items():
        if not issubclass(type(optimizer), torch.optim.Optimizer):
            continue
        orphans = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in held]
        shapes = {p.shape for p in orphans}
        if orphans and shapes <= {shape for _, shape in sharded} and not is_in_a_module(orphans):
            of = _outermost({m for m, shape in sharded if shape in shapes}, models)
            found[_sentence(name, len(orphans), of)] = [name, *of]
    return found


def _outermost(names: set[str], models: Mapping[str, torch.nn.Module]) -> list[str]:
    """Return the names of models that are not part of another model, sorted."""
    inside = {id(part) for model in models.values() for part in list(torch.nn.Module.modules(model))[1:]}
    return sorted(name for name in names if id(models[name]) not in inside)


def _sentence(optimizer: str, orphans: int, models: list[str]) -> str:
    """Return the sentence about an optimizer that holds parameters from before its models were sharded."""
    of, was = " and ".join(models), "was" if len(models) == 1 else "were"
    return (
        f"{optimizer} holds {orphans} parameter{'s' * (orphans > 1)} that no model uses: it was made before {of} {was} "
        f"sharded, so its steps do not change {of}; create it after fully_shard or parallelize_module"
    )


_WRONG = (
    "is in DDP twice: each step averages its gradients twice, and names in its state_dict() begin with module.module."
)


def watch_nested_ddp() -> None:
    """Print a warning in a cell that wraps a model in DDP twice."""
    after(DistributedDataParallel, "__init__", _look)


def nested_ddp(namespace: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return a sentence for each variable whose model is wrapped in DDP twice, with the variable.

    Args:
        namespace: variables.
    """
    twice = [name for name, model in namespace.items() if _is_twice(model)]
    return {f"{name} {_WRONG} {name} = {name}.module undoes one of them": [name] for name in twice}


def _is_twice(model: Any) -> bool:
    return type(model) is DistributedDataParallel and type(model.module) is DistributedDataParallel


def _look(_: Any, module: torch.nn.Module | None = None, *__: Any, **___: Any) -> None:
    if isinstance(module, DistributedDataParallel):
        print(
            f"ddp_notebook: this model {_WRONG} If the cell has run before, make the model in the same cell, or wrap "
            "the inner one: DDP(model.module)",
            file=sys.stderr,
        )


class Mistakes:
    """Mistakes of this rank.

    Args:
        recorder: collectives of the rank.
        modules: names of modules.

    Attributes:
        cell: number of the running cell, the same on all ranks. The checks reset themselves when it changes.
    """

    def __init__(self, recorder: Recorder, modules: Modules) -> None:
        self.cell = 0

        def listen(look: Any) -> None:
            recorder.listen("scaling", look)

        def cell() -> int:
            return self.cell

        self._scaling = Scaling(listen, cell)
        self._replicas = Replicas(modules.of_context, cell)
        self._saves = Saves(cell)
        self._last_steps = LastSteps(cell)

    def watch(self) -> None:
        """Start to detect mistakes. Checks that need functions missing in this torch version are skipped."""
        checks = self._scaling, self._replicas, self._saves, self._last_steps
        for watch in (*[check.watch for check in checks], watch_nested_ddp):
            with contextlib.suppress(ImportError, AttributeError):
                watch()

    def facts(self, namespace: Mapping[str, Any]) -> dict[str, Any]:
        """Return facts for the notebook as JSON; empty if there are none.

        `told` contains sentences about mistakes, and `about` the variables of each. `replicas` and `saves` are compared
        with those of other ranks. `stepped` has the cell of the last optimizer step by variable.

        Args:
            namespace: variables.
        """
        scalers = [name for name, value in namespace.items() if issubclass(type(value), torch.amp.GradScaler)]
        about = {**of_optimizers(namespace), **nested_ddp(namespace)}
        about |= dict.fromkeys(self._scaling.facts(), scalers)
        replicas = self._replicas.facts()
        facts = {
            "told": list(about),
            "about": about,
            "replicas": [one | {"about": _with_module(namespace, one["module"])} for one in replicas],
            "saves": self._saves.facts(),
            "stepped": self._last_steps.by_variable(namespace),
        }
        return {"kind": "mistake", **facts} if any(facts.values()) else {}


def _with_module(namespace: Mapping[str, Any], name: str) -> list[str]:
    """Return the variables that are a model with a module of this name, or an object with such a model."""
    found = []
    for variable, value in namespace.items():
        with contextlib.suppress(Exception):  # an object of the user may raise anything
            models = [value] if issubclass(type(value), torch.nn.Module) else [*vars(value).values()]
            if any(_has_module(model, name) for model in models):
                found.append(variable)
    return found


def _has_module(model: Any, name: str) -> bool:
    if not issubclass(type(model), torch.nn.Module):
        return False
    return name == ROOT or any(known == name for known, _ in torch.nn.Module.named_modules(model))
