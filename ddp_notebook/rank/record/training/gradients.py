"""Gradients of a parameter that the user has chosen: as computed on this rank, and averaged over the ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ddp_notebook.rank.hide_from_profiler import unseen
from ddp_notebook.rank.record import previews
from ddp_notebook.rank.record.event_buffer import OFF, EventBuffer
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import functools

_OWN, _AVERAGED = 2, 3  # side of a value in `records.VALUE`


class ChosenGradient(NamedTuple):
    """A gradient of the chosen parameter."""

    span: int  # span of the backward
    name: str
    side: int  # `_OWN` as computed on this rank, or `_AVERAGED`
    copy: previews.Copy


class GradientHook:
    """Observer of the gradients of one parameter, by a hook of the parameter.

    Args:
        event_buffer: receives the gradients.
    """

    def __init__(self, event_buffer: EventBuffer) -> None:
        self.parameter = ""  # name in the model; "" if none is chosen
        self._has_shown = False  # a gradient was recorded
        self._event_buffer = event_buffer
        self._to_be_averaged: list[tuple[int, str, torch.Tensor]] = []  # in the running backward
        self._hooked = WeakTensorKeyDictionary()  # parameters with a hook

    def begin_cell(self, parameter: str) -> None:
        """Choose the parameter for a starting cell.

        Args:
            parameter: name of the parameter, or "".
        """
        self.parameter, self._has_shown = parameter, False
        self._to_be_averaged.clear()

    def look_at(self, module: torch.nn.Module) -> None:
        """Add a hook to the chosen parameter, if this module has it. The next backward may be one of this module."""
        for name, parameter in module.named_parameters():
            if name == self.parameter and parameter.requires_grad and parameter not in self._hooked:
                self._hooked[parameter] = True
                parameter.register_post_accumulate_grad_hook(functools.partial(self._on_gradient, name))

    def _on_gradient(self, name: str, parameter: torch.Tensor) -> None:
        """Record a gradient before DDP averages it: DDP's own hook runs later."""
        backward = self._event_buffer.backward
        if name != self.parameter or backward is None or parameter.grad is None:
            return
        self._put(backward.number, name, _OWN, parameter.grad)
        self._to_be_averaged.append((backward.number, name, parameter))

    def end_backward(self) -> None:
        """Record the averaged gradients of a backward that has succeeded."""
        while self._to_be_averaged:
            span, name, parameter = self._to_be_averaged.pop()
            if parameter.grad is not None:
                self._put(span, name, _AVERAGED, parameter.grad)

    def forget_backward(self) -> None:
        """Forget the gradients of a backward that has ended, even if it has failed."""
        self._to_be_averaged.clear()

    def _put(self, span: int, name: str, side: int, gradient: torch.Tensor) -> None:
        copy = unseen(previews.copy, [gradient])
        if copy is not None:
            self._has_shown = True
            self._event_buffer.put(ChosenGradient(span, name, side, copy), is_large=True)

    def end_cell(self, modules: Iterable[torch.nn.Module]) -> None:
        """Print a message if no gradient of the chosen parameter was recorded.

        Args:
            modules: DDP models.
        """
        if self._has_shown:
            return
        names = {name: None for each in modules for name, one in each.named_parameters() if one.requires_grad}
        known = f"the models in DDP have {', '.join(names)}" if names else "no model is in DDP"
        if self._event_buffer.level == OFF:
            known = "nothing is recorded, see %ddp_record"
        elif self.parameter in names:
            known = "no backward pass has averaged its gradient"
        print(f"ddp_notebook: --gradient {self.parameter} recorded nothing: {_short(known)}", file=sys.stderr)


def _short(text: str, most: int = 300) -> str:
    return text if len(text) <= most else text[:most].rpartition(",")[0] + ", ..."
