"""Steps and names of optimizers."""

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
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import threading, time, weakref


class Optimizers:
    """Observer of optimizer steps, from `install` on.

    Args:
        event_buffer: its level is OFF if nothing is recorded.
        stepped: called after a step that is not inside another one, with the optimizer and the start time.
        begins: called before such a step, with the optimizer.
    """

    def __init__(
        self, event_buffer: EventBuffer, stepped: Callable[[Any, int], object], begins: Callable[[Any], None]
    ) -> None:
        self._event_buffer = event_buffer
        self._stepped, self._begins = stepped, begins
        # Ids and start times of the optimizers in their step, by thread.
        self.stepping: dict[int, list[tuple[int, int]]] = {}
        self._naming = threading.Lock()  # several threads may create optimizers at once
        self._names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self.of_cell: set[str] = set()  # names of the optimizers that have stepped in the cell
        self._last: tuple[Callable[[], Any], str] = nothing, ""  # last requested optimizer, probably the next one too

    def install(self) -> None:
        """Register the hooks of optimizer steps."""
        register_optimizer_step_pre_hook(uncompiled(self._before_step))
        register_optimizer_step_post_hook(uncompiled(self._after_step))

    def name(self, optimizer: Any) -> str:
        """Return the unique name of an optimizer."""
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
            del stack[max(0, _steps_under_way() - 1) :]  # the removed steps have raised
        stack.append((id(optimizer), time.monotonic_ns()))
        if len(stack) == 1:
            self._begins(optimizer)

    def _after_step(self, optimizer: Optimizer, _: Any, __: Any) -> None:
        stack = self.stepping.get(threading.get_ident(), [])
        while stack and stack[-1][0] != id(optimizer):
            stack.pop()
        if not stack:
            return
        _, began_ns = stack.pop()
        if not stack:  # otherwise the step is inside that of another optimizer
            self._stepped(optimizer, began_ns)


def _steps_under_way() -> int:
    """Return the number of optimizers in their step in this thread, by the wrapper frames of torch."""
    frame: FrameType | None = sys._getframe(1)
    count = 0
    while frame is not None:
        code, frame = frame.f_code, frame.f_back
        count += code.co_name == "wrapper" and code.co_filename == torchs.__file__
    return count
