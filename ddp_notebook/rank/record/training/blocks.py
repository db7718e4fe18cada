"""Parts of a program with a name: blocks of `torch.profiler.record_function`, and checkpoints that are saved.

torch names its own blocks in the same way. These are recognized by the file of the `with` statement, and not recorded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.profiler import record_function

from ddp_notebook.rank.imports import after_import
from ddp_notebook.rank.record.event_buffer import OFF, EventBuffer
from ddp_notebook.rank.record.training.wrapping import around
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import contextlib, os, threading, time

_TORCH = os.path.dirname(torch.__file__) + os.sep
_DISTRIBUTED = "torch.distributed.checkpoint"
_DECORATING = contextlib.__file__  # file of the `with` statement, if the block decorates a function


class _Here(threading.local):
    """Open blocks of this thread with their start times, innermost last. A new cell clears those of the main thread."""

    def __init__(self) -> None:
        self.open: list[tuple[Any, int]] = []


class Blocks:
    """Observer of named blocks, from `install` on.

    Args:
        event_buffer: its level is OFF if nothing is recorded.
        leave: receives the name and the start time of a block that has ended.
    """

    def __init__(self, event_buffer: EventBuffer, leave: Callable[[str, int], None]) -> None:
        self._event_buffer = event_buffer
        self._leave = leave
        self.here = _Here()

    def install(self) -> None:
        """Wrap the context manager of blocks."""
        around(record_function, "__enter__", self._around_enter)
        around(record_function, "__exit__", self._around_exit)

    def _around_enter(self, original: Callable[..., Any]) -> Callable[..., Any]:
        event_buffer, here = self._event_buffer, self.here

        def __enter__(self: Any) -> Any:
            entered = original(self)
            if event_buffer.level != OFF and not _is_torchs(sys._getframe(1)):
                here.open.append((self, time.monotonic_ns()))
            return entered

        return __enter__

    def _around_exit(self, original: Callable[..., Any]) -> Callable[..., Any]:
        here, leave = self.here, self._leave

        def __exit__(self: Any, exc_type: Any, exc_value: Any, traceback: Any) -> Any:
            blocks = here.open
            if not blocks or all(block is not self for block, _ in blocks):
                return original(self, exc_type, exc_value, traceback)
            try:
                return original(self, exc_type, exc_value, traceback)
            finally:
                while (one := blocks.pop())[0] is not self:  # an interrupt has skipped the exit of this block
                    pass
                leave(self.name, one[1])

        return __exit__


def _is_torchs(frame: Any) -> bool:
    file = frame.f_code.co_filename
    if file == _DECORATING and frame.f_back is not None:
        file = frame.f_back.f_code.co_filename
    return bool(file.startswith(_TORCH))


class Checkpoints:
    """Observer of checkpoints, from `install` on.

    Args:
        event_buffer: its level is OFF if nothing is recorded.
        leave: receives the name of the function and its start time.
    """

    def __init__(self, event_buffer: EventBuffer, leave: Callable[[str, int], None]) -> None:
        self._event_buffer = event_buffer
        self._leave = leave
        self._saving: set[int] = set()  # threads that are saving: one function may save a checkpoint by another one

    def install(self) -> None:
        """Wrap the functions that save checkpoints."""
        around(torch, "save", lambda original: self._around("torch.save", original))
        torch.serialization.save = torch.save  # pickle finds the function by this name
        after_import(_DISTRIBUTED, self._look_at_distributed)

    def _look_at_distributed(self) -> None:
        package, module = sys.modules[_DISTRIBUTED], sys.modules[f"{_DISTRIBUTED}.state_dict_saver"]
        around(module, "save", lambda original: self._around("torch.distributed.checkpoint.save", original))
        package.save = module.save  # type: ignore[attr-defined]

    def _around(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def save(*args: Any, **named: Any) -> Any:
            thread = threading.get_ident()
            if self._event_buffer.level == OFF or thread in self._saving:
                return original(*args, **named)
            began_ns = time.monotonic_ns()
            self._saving.add(thread)
            try:
                return original(*args, **named)
            finally:
                self._saving.discard(thread)
                self._leave(name, began_ns)

        return save
