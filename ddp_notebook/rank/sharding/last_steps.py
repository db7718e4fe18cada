"""Cells in which optimizers made steps, to list models of earlier cells last."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from ddp_notebook.stdlib import weakref


class LastSteps:
    """Number of the last cell in which each parameter was part of an optimizer step.

    Args:
        cell: returns the number of the running cell.

    Example:
        >>> LastSteps(lambda: 1).by_variable({"model": torch.nn.Linear(1, 1)})
        {}
    """

    def __init__(self, cell: Callable[[], int]) -> None:
        self._cell = cell
        self._known_in = 0  # cell of `_known`
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # optimizers with a step in that cell
        self._cells: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}  # keys are ids of parameters

    def watch(self) -> None:
        """Register the hook of torch."""
        register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        if (cell := self._cell()) != self._known_in:
            self._known_in = cell
            self._known.clear()
            self._cells = {key: one for key, one in self._cells.items() if one[0]() is not None}
        if optimizer not in self._known:
            self._known.add(optimizer)
            for parameter in _parameters(optimizer):
                self._cells[id(parameter)] = weakref.ref(parameter), cell

    def by_variable(self, namespace: Mapping[str, Any]) -> dict[str, int]:
        """Return the cell of the last step by variable: a model, an optimizer, a scheduler or a tensor."""
        found = {}
        for name, value in namespace.items():
            if last := max(map(self._cell_of, _held(value)), default=0):
                found[name] = last
        return found

    def _cell_of(self, parameter: torch.Tensor) -> int:
        known = self._cells.get(id(parameter))
        return known[1] if known is not None and known[0]() is parameter else 0


def _parameters(optimizer: Optimizer) -> Iterable[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _held(value: Any) -> Iterable[torch.Tensor]:
    """Return the parameters of a variable: of a model, an optimizer, a scheduler's optimizer, or the tensor itself."""
    if issubclass(type(value), torch.optim.lr_scheduler.LRScheduler):
        value = getattr(value, "optimizer", None)
    if issubclass(type(value), torch.nn.Module):
        return torch.nn.Module.parameters(value)
    if issubclass(type(value), Optimizer):
        return _parameters(value)
    return (value,) if issubclass(type(value), torch.Tensor) else ()
