"""Optimizers in their steps, and their names."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch.optim import optimizer as torchs
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ddp_notebook.rank.record.event_buffer import OFF, EventBuffer
from ddp_notebook.rank.record.training.model_names import new_name, nothing
from ddp_notebook.rank.record.training.wrapping import uncompiled
from ddp_notebook.stdlib import threading, time, weakref


class Optimizers:
    """Sees the steps of optimizers from `install` on.

    Args:
        event_buffer: says whether anything is recorded.
        stepped: gets an optimizer that has stepped inside no other, and when it began.
    """

    def __init__(self, event_buffer: EventBuffer, stepped: Callable[[Any, int], object]) -> None:
        self._event_buffer = event_buffer
        self._stepped = stepped
        # By thread: optimizers in their step, by their id, and when that began.
        self.stepping: dict[int, list[tuple[int, int]]] = {}
        self._naming = threading.Lock()  # they may be new in several threads at once
        self._names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self.of_cell: set[str] = set()  # names of those that have stepped in the cell
        self._last: tuple[Callable[[], Any], str] = nothing, ""  # that was asked for: probably the next one again

    def install(self) -> None:
        """Begin to look."""
        register_optimizer_step_pre_hook(uncompiled(self._before_step))
        register_optimizer_step_post_hook(uncompiled(self._after_step))

    def name(self, optimizer: Any) -> str:
        """Its name, which no other one has."""
        last, name = self._last
        if last() is optimizer and name in self.of_cell:
            return name
        self._event_buffer.thinning.turns += 1
        with self._naming:
            if (name := self._names.get(optimizer, "")) == "":
                name = self._names[optimizer] = new_name(optimizer, set(self._names.values()))
        self._last = weakref.ref(optimizer), name
        return name

    def _before_step(self, optimizer: Optimizer, _: Any, __: Any) -> None:
        if self._event_buffer.level == OFF:
            return
        stack = self.stepping.setdefault(threading.get_ident(), [])
        if stack:
            del stack[max(0, _steps_under_way() - 1) :]  # those have raised
        stack.append((id(optimizer), time.monotonic_ns()))

    def _after_step(self, optimizer: Optimizer, _: Any, __: Any) -> None:
        stack = self.stepping.get(threading.get_ident(), [])
        while stack and stack[-1][0] != id(optimizer):
            stack.pop()
        if not stack:
            return
        _, began_ns = stack.pop()
        if not stack:  # else a step inside another optimizer's
            self._stepped(optimizer, began_ns)


def _steps_under_way() -> int:
    """How many optimizers are in their step in this thread, by the wrapper that torch puts around it."""
    frame: FrameType | None = sys._getframe(1)
    count = 0
    while frame is not None:
        code, frame = frame.f_code, frame.f_back
        count += code.co_name == "wrapper" and code.co_filename == torchs.__file__
    return count
