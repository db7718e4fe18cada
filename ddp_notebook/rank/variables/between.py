"""Tasks for the main thread between two optimizer steps of the running cell, where no variable is partly changed."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch

from ddp_notebook.records.words import in_function
from ddp_notebook.stdlib import os, threading

Task = Callable[[Mapping[str, Any], int], None]
_DEEPEST = 64  # maximum number of frames searched from an optimizer step
_main = threading.main_thread().ident
_NOT_THE_USERS = (  # path parts of files that do not belong to the user
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep,  # this package
    f"{os.sep}site-packages{os.sep}",
)


class BetweenSteps:
    """Tasks of this process. Without tasks, an optimizer step only checks an empty queue."""

    def __init__(self) -> None:
        self._tasks: deque[Task] = deque()
        self._lock = threading.Lock()
        self.is_in_cell = False  # set without the lock when a cell starts; only `end_cell` resets it

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def put(self, task: Task) -> bool:
        """Queue a task for the time after the next optimizer step of the main thread, or for the end of the cell.

        Thread-safe.

        Args:
            task: gets the variables of the functions on the stack of the optimizer step, and the number of steps of the
                cell. Variables of inner functions hide those of outer ones. The number is -1 after the end of the cell.

        Returns:
            True while a cell runs. If False, the caller must make the main thread call `run_outside`. If a cell starts
            before that, the cell runs the task.
        """
        with self._lock:
            self._tasks.append(task)
            return self.is_in_cell

    def end_cell(self) -> None:
        """Run the remaining tasks at the end of the cell."""
        with self._lock:
            self.is_in_cell = False
        self.run_outside()

    def run_outside(self) -> None:
        """Run the remaining tasks while no cell runs."""
        self._run({}, -1)

    def stepped(self, steps: int) -> None:
        """Run the tasks after an optimizer step in this thread."""
        if threading.get_ident() == _main:
            self._run(_variables(sys._getframe(1)), steps)

    def _run(self, variables: Mapping[str, Any], steps: int) -> None:
        failure: BaseException | None = None
        while self._tasks:
            try:
                self._tasks.popleft()(variables, steps)
            except BaseException as error:  # an interrupt: the other requests still need their replies
                failure = failure or error
        if failure is not None:
            raise failure


def _variables(frame: FrameType | None) -> dict[str, Any]:
    """Return the variables of the user's functions on the stack. Those of inner functions hide those of outer ones."""
    found: dict[str, Any] = {}
    for _ in range(_DEEPEST):
        if frame is None:
            break
        file = frame.f_code.co_filename
        if not any(part in file for part in _NOT_THE_USERS):
            if not in_function(frame.f_code.co_name):
                break
            found = {**frame.f_locals, **found}
        frame = frame.f_back
    return found
