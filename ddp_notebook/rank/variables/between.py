"""Tasks for the main thread between two optimizer steps of the running cell, where no variable is half changed."""

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
_DEEPEST = 64  # frames around an optimizer's step that are looked at
_main = threading.main_thread().ident
_NOT_THE_USERS = (  # parts of the paths of such code
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep,  # this package
    f"{os.sep}site-packages{os.sep}",
)


class BetweenSteps:
    """The tasks of this process. While there is none, an optimizer step costs the look at an empty queue."""

    def __init__(self) -> None:
        self._tasks: deque[Task] = deque()
        self._lock = threading.Lock()
        self.is_in_cell = False  # set as a cell begins, which needs no lock; only `end_cell` resets it

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def put(self, task: Task) -> bool:
        """Have a task done after the next optimizer step of the main thread, or at the end of the cell. Callable from
        any thread.

        Args:
            task: gets the variables of the functions that have called the optimizer, where those of the innermost one
                hide others, and how many steps the cell has taken; -1: the cell has ended.

        Returns:
            True while a cell runs. If False, the caller has the main thread call `run_outside`. A cell that begins
            before that runs the task.
        """
        with self._lock:
            self._tasks.append(task)
            return self.is_in_cell

    def end_cell(self) -> None:
        """The cell has ended: run the remaining tasks."""
        with self._lock:
            self.is_in_cell = False
        self.run_outside()

    def run_outside(self) -> None:
        """Run the remaining tasks, while no cell runs."""
        self._run({}, -1)

    def stepped(self, steps: int) -> None:
        """An optimizer has stepped in this thread."""
        if threading.get_ident() == _main:
            self._run(_variables(sys._getframe(1)), steps)

    def _run(self, variables: Mapping[str, Any], steps: int) -> None:
        failure: BaseException | None = None
        while self._tasks:
            try:
                self._tasks.popleft()(variables, steps)
            except BaseException as error:  # an interrupt: the other questions need their answers too
                failure = failure or error
        if failure is not None:
            raise failure


def _variables(frame: FrameType | None) -> dict[str, Any]:
    """The variables of the user's functions on the stack: those of the innermost one hide those of others."""
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
