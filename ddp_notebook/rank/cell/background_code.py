"""User code that runs on a rank while no cell does: threads and tasks. It may still start operations."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch

from ddp_notebook.rank.cell.current_line import OURS, CurrentLine
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import asyncio, os, threading

_PYTHON = os.path.dirname(threading.__file__ or "") + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
_DISTRIBUTED = os.path.join(_TORCH, "distributed") + os.sep
# A thread whose code is only in these files starts no operation: idle workers of pools, queues and data loaders, and
# the threads of Jupyter and of progress bars. A thread in any other file may start one.
_HARMLESS = (
    *(_PYTHON + name for name in ("threading.py", "queue.py", "selectors.py", "socket.py", "weakref.py")),
    *(_PYTHON + name + os.sep for name in ("concurrent", "multiprocessing")),
)
_HARMLESS_PACKAGES = (
    *("tqdm", "IPython", "ipykernel", "ipyparallel", "traitlets", "zmq", "tornado", "jupyter_client"),
    *("tensorboard", "wandb"),
)


class BackgroundCode:
    """Finds user code that runs outside of cells. Made before the first cell, in the main thread.

    Args:
        where: finds the position of threads.
        in_operations: returns the threads that are in an operation.
    """

    def __init__(self, where: CurrentLine, in_operations: Callable[[], set[int]]) -> None:
        self._where = where
        self._in_operations = in_operations
        self._main = threading.main_thread().ident or 0
        self._loop = asyncio.get_running_loop()
        self._first = set(threading.enumerate())  # threads of the rank itself

    def words(self) -> str:
        """Describe code that may still start an operation; "" if there is none. Callable from any thread.

        Example: `"thread 'worker' at cell line 2 in work"`.
        """
        frames = sys._current_frames()
        busy = self._in_operations()
        for thread in threading.enumerate():
            number = thread.ident or 0
            if number == self._main or thread in self._first or _is_ours(thread, frames.get(number)):
                continue
            if number in busy or _is_timer(thread) or (number in frames and _may_act(frames[number])):
                return self._where.of_thread(number)
        return next(self._of_tasks(), "")

    def _of_tasks(self) -> Iterator[str]:
        """Yield descriptions of tasks of the event loop that a cell has left."""
        for task in list(asyncio.all_tasks(self._loop)):
            coroutine: Any = task.get_coro()
            code = getattr(coroutine, "cr_code", None)
            if code is not None and not _is_harmless(code.co_filename):
                yield f"task {task.get_name()!r} in {code.co_name}"


def _is_ours(thread: Any, frame: FrameType | None) -> bool:
    """Return whether this package has started a thread. The user may have given a thread such a name, too."""
    if not thread.name.startswith("ddp-"):
        return False
    first = OURS
    while frame is not None:
        if frame.f_code.co_filename != threading.__file__:
            first = frame.f_code.co_filename
        frame = frame.f_back
    return first.startswith(OURS)


def _is_timer(thread: Any) -> bool:
    kind: Any = sys.modules["threading"].Timer
    return isinstance(thread, kind)


def _may_act(frame: FrameType | None) -> bool:
    while frame is not None:
        if not _is_harmless(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False


def _is_harmless(file: str) -> bool:
    if file.startswith(_DISTRIBUTED):
        return False
    if file.startswith((OURS, _TORCH, *_HARMLESS)) or file.startswith("<"):
        return True
    return any(f"{os.sep}{name}{os.sep}" in file for name in _HARMLESS_PACKAGES)
