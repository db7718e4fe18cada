"""Wrong uses that nothing else complains about: the training goes on, and learns nothing, or something else."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def of_optimizers(namespace: Mapping[str, Any]) -> list[str]:
    """Optimizers that hold what a model had before it was sharded: `fully_shard` and `parallelize_module` put other
    parameters in its place, so their steps change nothing.

    Only where no module of this process has these parameters, and one of a sharded model has each one's shape.

    Example:
        >>> model = torch.nn.Linear(2, 2)
        >>> of_optimizers({"model": model, "optimizer": torch.optim.SGD(model.parameters())})
        []
    """
    own = {name: value for name, value in namespace.items() if not name.startswith("_")}
    models = {name: one for name, one in own.items() if issubclass(type(one), torch.nn.Module)}
    from_models = [(name, p) for name, model in models.items() for p in torch.nn.Module.parameters(model)]
    inside = {id(part) for model in models.values() for part in list(torch.nn.Module.modules(model))[1:]}
    held = {id(p) for _, p in from_models}
    sharded = [(name, p.shape) for name, p in from_models if hasattr(p, "placements")]
    found = []
    for name, optimizer in own.items():
        if not sharded or not issubclass(type(optimizer), torch.optim.Optimizer):
            continue
        orphans = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in held]
        shapes = {p.shape for p in orphans}
        its = {model for model, shape in sharded if shape in shapes and id(models[model]) not in inside}
        if orphans and shapes <= {shape for _, shape in sharded} and not _is_in_a_module(orphans):
            of = " and ".join(sorted(its))
            count = f"{len(orphans)} parameter{'s' * (len(orphans) > 1)}"
            found.append(
                f"{name} holds {count} that no model uses: it was made before {of} was sharded, so its steps change "
                f"nothing of {of}; make it after fully_shard or parallelize_module"
            )
    return found


def _is_in_a_module(parameters: list[torch.Tensor]) -> bool:
    """Whether a module anywhere in this process has one of these, or a variable of the user's is one."""
    parameters = [p for p in parameters if isinstance(p, torch.nn.Parameter)]
    if not parameters:
        return True  # tensors of the user's own
    wanted = {id(p) for p in parameters}
    for module in gc.get_objects():
        if issubclass(type(module), torch.nn.Module) and any(id(p) in wanted for p in module._parameters.values()):
            return True
    return False


class Scaling:
    """Sees gradients clipped while they are scaled, which a `GradScaler` undoes only afterwards.

    Example:
        >>> Scaling().told()
        []
    """

    def __init__(self) -> None:
        self._scaled: weakref.WeakSet[Any] = weakref.WeakSet()  # scalers with a loss scaled and nothing unscaled since
        self._clipped: dict[str, set[int]] = {}  # by the function: ids of parameters that were clipped meanwhile
        self._told: dict[str, int] = {}  # how often, by the function
        self._is_new = False

    def told(self) -> list[str]:
        """What was seen in the last cell that has scaled a loss."""
        return [
            f"gradients were clipped by {name} {times} time{'s' * (times > 1)} while a GradScaler had them scaled: "
            "call scaler.unscale_(optimizer) before"
            for name, times in self._told.items()
        ]

    def begin_cell(self) -> None:
        """A cell begins."""
        self._scaled.clear()
        self._clipped.clear()
        self._is_new = True

    def watch(self) -> None:
        """Begin to look.

        Raises:
            AttributeError: this torch has no such functions.
        """
        scaler = torch.amp.GradScaler
        _before(scaler, "scale", self._scale)
        for name in ("unscale_", "step"):
            _before(scaler, name, self._unscale)
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            _before(torch.nn.utils, name, functools.partial(self._clip, name))

    def _scale(self, scaler: Any, *_: Any, **__: Any) -> None:
        if scaler.is_enabled():
            self._scaled.add(scaler)
            if self._is_new:
                self._is_new = False
                self._told.clear()

    def _clip(self, name: str, parameters: Any = (), *_: Any, **__: Any) -> None:
        if self._scaled and not isinstance(parameters, Iterator):  # an iterator is not to be used up
            ones = [parameters] if isinstance(parameters, torch.Tensor) else parameters
            self._clipped.setdefault(name, set()).update(map(id, ones))

    def _unscale(self, scaler: Any, optimizer: Any, *_: Any, **__: Any) -> None:
        """Only what this scaler's optimizer steps was scaled: another model may have been clipped rightly."""
        if scaler not in self._scaled:
            return
        self._scaled.discard(scaler)
        its = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name, clipped in self._clipped.items():
            if not its.isdisjoint(clipped) and scaler.get_scale() != 1.0:
                self._told[name] = self._told.get(name, 0) + 1
        self._clipped.clear()


def _before(owner: Any, name: str, look: Callable[..., None]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def function(*args: Any, **named: Any) -> Any:
        if not torch.compiler.is_compiling():
            look(*args, **named)
        return original(*args, **named)

    setattr(owner, name, function)
