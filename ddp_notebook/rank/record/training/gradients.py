"""The gradients of one parameter that the user has chosen: as computed here, and averaged over the ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ddp_notebook.rank.hide_from_profiler import unseen
from ddp_notebook.rank.record import previews
from ddp_notebook.rank.record.event_buffer import OFF, EventBuffer
from ddp_notebook.stdlib import functools

_OWN, _AVERAGED = 2, 3  # the side of a value, of `records.VALUE`


class ChosenGradient(NamedTuple):
    """A gradient of the chosen parameter."""

    span: int  # the backward
    name: str
    side: int  # as computed here, or averaged over the ranks
    copy: previews.Copy


class GradientHook:
    """Looks at the gradients of one parameter, by a hook of the parameter.

    Args:
        event_buffer: where they are left.
    """

    def __init__(self, event_buffer: EventBuffer) -> None:
        self.parameter = ""  # its name in the model; empty: none is chosen
        self._has_shown = False  # one of its gradients was kept
        self._event_buffer = event_buffer
        self._to_be_averaged: list[tuple[int, str, torch.Tensor]] = []  # in the backward under way
        self._hooked = WeakTensorKeyDictionary()  # parameters

    def begin_cell(self, parameter: str) -> None:
        """A cell begins.

        Args:
            parameter: the name of the parameter to look at, or empty.
        """
        self.parameter, self._has_shown = parameter, False
        self._to_be_averaged.clear()

    def look_at(self, module: torch.nn.Module) -> None:
        """The next backward may be one of this module: hook the chosen parameter, if it is there."""
        for name, parameter in module.named_parameters():
            if name == self.parameter and parameter.requires_grad and parameter not in self._hooked:
                self._hooked[parameter] = True
                parameter.register_post_accumulate_grad_hook(functools.partial(self._on_gradient, name))

    def _on_gradient(self, name: str, parameter: torch.Tensor) -> None:
        """A gradient is there, and DDP has not averaged it yet: its own hook comes later."""
        backward = self._event_buffer.backward
        if name != self.parameter or backward is None or parameter.grad is None:
            return
        self._put(backward.number, name, _OWN, parameter.grad)
        self._to_be_averaged.append((backward.number, name, parameter))

    def end_backward(self) -> None:
        """A backward has ended well: what it has left are averages."""
        while self._to_be_averaged:
            span, name, parameter = self._to_be_averaged.pop()
            if parameter.grad is not None:
                self._put(span, name, _AVERAGED, parameter.grad)

    def forget_backward(self) -> None:
        """A backward has ended, perhaps with an error."""
        self._to_be_averaged.clear()

    def _put(self, span: int, name: str, side: int, gradient: torch.Tensor) -> None:
        copy = unseen(previews.copy, [gradient])
        if copy is not None:
            self._has_shown = True
            self._event_buffer.put(ChosenGradient(span, name, side, copy), is_large=True)

    def end_cell(self, modules: Iterable[torch.nn.Module]) -> None:
        """Say so if the chosen parameter was not seen.

        Args:
            modules: those in DDP.
        """
        if self._has_shown:
            return
        names = {name: None for each in modules for name, one in each.named_parameters() if one.requires_grad}
        known = f"the models in DDP have {', '.join(names)}" if names else "there is no model in DDP"
        if self._event_buffer.level == OFF:
            known = "nothing is recorded, see %ddp_record"
        elif self.parameter in names:
            known = "it was in no backward that averages gradients"
        print(f"ddp_notebook: --gradient {self.parameter} has shown nothing: {_short(known)}", file=sys.stderr)


def _short(text: str, most: int = 300) -> str:
    return text if len(text) <= most else text[:most].rpartition(",")[0] + ", ..."
