"""Optimizers whose gradients are reset but never used, or used but never reset."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ddp_notebook.rank.findings.optimizer_parameters import OptimizerParameters, held_by
from ddp_notebook.rank.findings.tensor_checks import are_finite, are_zero, local, some_of
from ddp_notebook.stdlib import weakref

_FEWEST = 3  # gradients that were reset without a step, or that a backward has added to those of a step
_SOME = 4  # parameters of an optimizer that are compared


class _Unused:
    """An optimizer that has reset gradients and has made no step.

    Args:
        optimizer: the optimizer.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.count = 0  # gradients that a backward has computed after a reset
        self.is_reset = True  # and has no gradient since then
        some = held_by(optimizer)[:_SOME]
        self._before = [(weakref.ref(p), some_of(p)) for p in some if not p.is_cuda and not p.is_meta]

    def end_backward(self) -> None:
        """Count a gradient after a reset."""
        gradients = [p.grad for one, _ in self._before if (p := one()) is not None and p.grad is not None]
        if self.is_reset and any(some_of(one).any() for one in gradients):
            self.is_reset = False
            self.count += 1

    def has_gradients(self, trained: set[int]) -> bool:
        """Return whether a step would change the parameters, and nothing else has changed them.

        Args:
            trained: ids of parameters that other optimizers have changed.
        """
        parameters = [p for p in held_by(self.optimizer()) if p.requires_grad]
        gradients = [p.grad for p in parameters if p.grad is not None]
        if not gradients or not trained.isdisjoint(map(id, parameters)):
            return False
        if any((p := one()) is None or not torch.equal(some_of(p), values) for one, values in self._before):
            return False
        return not are_zero(gradients, 0)[0] and are_finite(gradients)


class Resets:
    """Gradients of the running cell that were reset.

    Args:
        note: keeps a fact.
        has_stepped: returns whether an optimizer has ever made a step.
        title: returns the name of an optimizer.
    """

    def __init__(
        self, note: Callable[..., None], has_stepped: Callable[[Any], bool], title: Callable[[Any], str]
    ) -> None:
        self._note, self._has_stepped, self._title = note, has_stepped, title
        self._unused: dict[int, _Unused] = {}
        self._kept: dict[int, _Kept] = {}

    def begin_cell(self) -> None:
        """Forget the gradients of the last cell."""
        self._unused.clear()
        self._kept.clear()

    def zeroed(self, owner: Any) -> None:
        """Note that an optimizer or a module resets its gradients."""
        for kept in self._kept.values():
            kept.is_over = kept.is_over or any(id(p) in kept.ids for p in held_by(owner))
        if not isinstance(owner, torch.optim.Optimizer) or self._has_stepped(owner):
            return
        one = self._unused.get(id(owner))
        if one is None or one.optimizer() is not owner:
            self._unused[id(owner)] = _Unused(owner)
        else:
            one.is_reset = True

    def backward_begins(self) -> None:
        """Note whether gradients of the last step are still there."""
        for kept in self._kept.values():
            if not kept.is_over:
                kept.begin_backward()

    def backward(self) -> None:
        """Note the end of a backward."""
        for one in self._unused.values():
            one.end_backward()
        for kept in self._kept.values():
            if not kept.is_over:
                kept.end_backward()

    def stepped(self, held: OptimizerParameters, step: int) -> None:
        """Keep a gradient that a step has used."""
        self._unused.pop(id(held.optimizer), None)
        kept = self._kept.get(id(held))
        if kept is None:
            kept = self._kept[id(held)] = _Kept(held.ids, step)
        if not kept.is_over:
            kept.end_step(held, step)

    def end_cell(self, cell: Iterable[OptimizerParameters]) -> None:
        """Note the optimizers without a reset, and those without a step.

        Args:
            cell: parameters of the optimizers that have made a step.
        """
        steps = {id(held): held for held in cell}
        for key, kept in self._kept.items():
            own = steps[key].optimizer if key in steps else None
            if own is not None and not kept.is_over and kept.count >= _FEWEST:
                self._note("never-reset", kept.first, last=kept.last, count=kept.count + 1, optimizer=self._title(own))
        most = max((held.steps for held in steps.values()), default=0)
        trained = set[int]().union(*(held.ids for held in steps.values()))
        for one in self._unused.values():
            optimizer = one.optimizer()
            if optimizer is None or min(most, one.count) < _FEWEST or self._has_stepped(optimizer):
                continue
            if one.has_gradients(trained):
                self._note("never-stepped", 1, last=most, count=one.count, optimizer=self._title(optimizer))


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
