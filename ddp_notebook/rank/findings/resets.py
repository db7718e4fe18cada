"""Optimizers whose gradients are used but never reset."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ddp_notebook.rank.findings.optimizer_parameters import OptimizerParameters, held_by
from ddp_notebook.rank.findings.tensor_checks import local, some_of
from ddp_notebook.stdlib import weakref

_FEWEST = 3  # gradients that a backward has added to those of a step
_SOME = 4  # parameters of an optimizer that are compared


class Resets:
    """Gradients of the running cell that were reset.

    Args:
        note: keeps a fact.
        title: returns the name of an optimizer.
    """

    def __init__(self, note: Callable[..., None], title: Callable[[Any], str]) -> None:
        self._note, self._title = note, title
        self._kept: dict[int, _Kept] = {}

    def begin_cell(self) -> None:
        """Forget the gradients of the last cell."""
        self._kept.clear()

    def zeroed(self, owner: Any) -> None:
        """Note that an optimizer or a module resets its gradients."""
        for kept in self._kept.values():
            kept.is_over = kept.is_over or any(id(p) in kept.ids for p in held_by(owner))

    def backward_begins(self) -> None:
        """Note whether gradients of the last step are still there."""
        for kept in self._kept.values():
            if not kept.is_over:
                kept.begin_backward()

    def backward(self) -> None:
        """Note the end of a backward."""
        for kept in self._kept.values():
            if not kept.is_over:
                kept.end_backward()

    def stepped(self, held: OptimizerParameters, step: int) -> None:
        """Keep a gradient that a step has used."""
        kept = self._kept.get(id(held))
        if kept is None:
            kept = self._kept[id(held)] = _Kept(held.ids, step)
        if not kept.is_over:
            kept.end_step(held, step)

    def end_cell(self, cell: Iterable[OptimizerParameters]) -> None:
        """Note the optimizers without a reset.

        Args:
            cell: parameters of the optimizers that have made a step.
        """
        steps = {id(held): held for held in cell}
        for key, kept in self._kept.items():
            own = steps[key].optimizer if key in steps else None
            if own is not None and not kept.is_over and kept.count >= _FEWEST:
                self._note("never-reset", kept.first, last=kept.last, count=kept.count + 1, optimizer=self._title(own))


class _Kept:
    """Gradients of an optimizer that were not reset between its steps so far.

    Args:
        ids: ids of its parameters.
        step: its first step.
    """

    def __init__(self, ids: set[int], step: int) -> None:
        self.ids = ids
        self.first = self.last = step
        self.count = 0  # steps whose gradients were added to those of the step before
        self.is_over = False  # a gradient was reset, or changed otherwise
        self._parameter: Callable[[], Any] = lambda: None
        self._values: torch.Tensor | None = None  # some elements of its gradient at the last step
        self._place = 0  # address of that gradient
        self._is_kept = False  # a backward has begun with these elements
        self._is_added = False  # and has changed them in place

    @property
    def _gradient(self) -> torch.Tensor | None:
        parameter = self._parameter()
        return None if parameter is None else parameter.grad

    def begin_backward(self) -> None:
        """Compare the gradient before a backward with that of the last step."""
        if self._is_kept or self._values is None:
            return
        gradient = self._gradient
        self._is_kept = gradient is not None and torch.equal(some_of(gradient), self._values)
        self.is_over = not self._is_kept

    def end_backward(self) -> None:
        """Note whether a backward has added to the gradient. The program may replace it instead."""
        gradient = self._gradient
        if self._is_kept and not self._is_added and self._values is not None and gradient is not None:
            is_same = local(gradient).data_ptr() == self._place
            self._is_added = is_same and not torch.equal(some_of(gradient), self._values)

    def end_step(self, held: OptimizerParameters, step: int) -> None:
        """Keep elements of a gradient that the step has used."""
        if self._values is None:
            some = [p for p in held.parameters[:_SOME] if p.grad is not None and not p.grad.is_cuda]
            parameter = next((p for p in some if some_of(p.grad).any()), None)  # type: ignore[arg-type]
            self._parameter = (lambda: None) if parameter is None else weakref.ref(parameter)
        else:
            self.is_over = not self._is_added
            self.count, self.last = self.count + 1, step
        if (gradient := self._gradient) is None:
            self.is_over = True
            return
        self._values, self._place = some_of(gradient), local(gradient).data_ptr()
        self._is_kept = self._is_added = False
