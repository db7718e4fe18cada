"""Gradients that are clipped before `backward()` has computed them, or after the step that has used them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ddp_notebook.rank.findings.optimizer_parameters import OptimizerParameters, held_by
from ddp_notebook.rank.findings.tensor_checks import are_zero
from ddp_notebook.rank.record.training.step_observer import tell
from ddp_notebook.rank.record.training.wrapping import around, traced_as
from ddp_notebook.stdlib import functools, threading

_FUNCTIONS = "clip_grad_norm_", "clip_grad_value_"
_CONSECUTIVE = 2  # steps without clipping before a finding
_MOST = 64  # calls of a cell that are looked at
_MEASURES = 1e4  # a larger limit only serves to get the norm


class _Clip:
    """A call that clips gradients.

    Args:
        function: its name.
        ids: ids of the parameters.
        is_empty: the parameters had no gradients, or only zeros.
        is_late: an optimizer of the parameters has stepped since the last backward.
    """

    def __init__(self, function: str, ids: set[int], *, is_empty: bool, is_late: bool) -> None:
        self.function, self.ids, self.is_empty, self.is_late = function, ids, is_empty, is_late
        self.is_reset = False  # `zero_grad` has reset the clipped gradients

    @property
    def cause(self) -> str:
        """Return why the clipped gradients are not used by a step; "" if they may be."""
        if self.is_late:
            return "late" if self.is_empty or self.is_reset else ""
        return "early" if self.is_empty else ""


class Clipping:
    """Calls of the running cell that clip gradients.

    Args:
        note: keeps a fact.
    """

    def __init__(self, note: Callable[..., None]) -> None:
        self._note = note
        self._main = threading.get_ident()
        self._looked = 0  # calls of the cell
        self._since: list[_Clip] = []  # since the last backward
        self._before: list[_Clip] = []  # between the last step of their optimizer and the last backward
        self._stepped: list[set[int]] = []  # ids of the parameters of optimizers that stepped since the last backward
        self._found: dict[int, tuple[int, int, _Clip]] = {}  # by optimizer: first step, number of steps, first call
        for name in _FUNCTIONS:
            around(torch.nn.utils, name, functools.partial(self._around, name))

    def begin_cell(self) -> None:
        """Forget the calls of the last cell."""
        self._looked = 0
        self._since.clear()
        self._before.clear()
        self._stepped.clear()
        self._found.clear()

    def _around(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def clip(parameters: Any, limit: Any, *args: Any, **named: Any) -> Any:
            if self._looked < _MOST and threading.get_ident() == self._main:
                if isinstance(parameters, Iterator):  # it is used twice; torch warns of an empty one
                    parameters = list(parameters) or parameters
                tell(self._clipped, name, parameters, limit)
            return original(parameters, limit, *args, **named)

        def clip_by_name(*args: Any, **named: Any) -> Any:
            if len(args) >= 2:
                return clip(*args, **named)
            first = args[0] if args else named.pop("parameters")
            limit = named.pop("max_norm" if name == _FUNCTIONS[0] else "clip_value")
            return clip(first, limit, **named)

        return traced_as(original, clip_by_name)

    def _clipped(self, function: str, parameters: torch.Tensor | Iterable[torch.Tensor], limit: Any) -> None:
        self._looked += 1
        if not isinstance(limit, int | float) or limit >= _MEASURES:
            return
        ones = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        ids = {id(p) for p in ones}
        gradients = [gradient for p in ones if (gradient := p.grad) is not None]
        is_empty = not gradients or (not gradients[0].is_cuda and are_zero(gradients, 0)[0])
        is_late = any(not ids.isdisjoint(stepped) for stepped in self._stepped)
        self._since.append(_Clip(function, ids, is_empty=is_empty, is_late=is_late))

    def zeroed(self, owner: Any) -> None:
        """Note that an optimizer or a module has reset its gradients."""
        if self._since:
            ids = {id(p) for p in held_by(owner)}
            for clip in self._since:
                clip.is_reset |= not ids.isdisjoint(clip.ids)

    def backward(self) -> None:
        """Note the end of a backward."""
        self._before += self._since
        self._since.clear()
        self._stepped.clear()

    def stepped(self, held: OptimizerParameters, step: int) -> None:
        """Note consecutive steps of an optimizer whose gradients were clipped only when this has no effect."""
        self._stepped.append(held.ids)
        if not self._looked:
            return
        is_clipped = any(not one.ids.isdisjoint(held.ids) for one in self._since)
        before = [one for one in self._before if not one.ids.isdisjoint(held.ids)]
        self._before = [one for one in self._before if one.ids.isdisjoint(held.ids)]
        if is_clipped or not before or not all(one.cause for one in before):
            self._found.pop(id(held), None)
            return
        first, count, clip = self._found.get(id(held), (step, 0, before[0]))
        self._found[id(held)] = first, count + 1, clip
        if count + 1 == _CONSECUTIVE:
            self._note("clipped-without-effect", first, function=clip.function, cause=clip.cause)
