"""What the main thread of a rank is in, in the words of its user: the line of the cell, or of the file that it called,
and what that line called."""

from __future__ import annotations

import asyncio
import os
import sys
import sysconfig
import threading
from types import FrameType, TracebackType
from typing import Any

import torch

_STAND_INS = {"init_process_group", "init_rpc"}  # functions of ours in the place of torch's
_WALKS = 5
_WRAPPERS = {"wrapper", "_wrapped_call_impl", "_call_impl", "__call__", "_fn", "inner", "decorate_context"}
_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.dirname(__file__) + os.sep
_LIBRARIES = tuple(path + os.sep for path in sysconfig.get_paths().values())


class Where:
    """Knows which files are cells."""

    def __init__(self) -> None:
        self.cells: dict[str, int] = {}  # file -> number in `In [n]`
        self._current = 0
        self._main = threading.main_thread().ident or 0
        self.task: asyncio.Task[Any] | None = None  # of a cell with a top-level `await`

    def enter(self, file: str, execution_count: int) -> None:
        """A cell begins. Called for each: two assignments."""
        self.cells[file] = self._current = execution_count

    def describe(self) -> str:
        """Such as `"cell line 3, in all_reduce"` or `"dataset.py:88 in __getitem__, from cell line 3"`; empty outside
        of a cell's code. From any thread."""
        for _ in range(_WALKS):  # a call that returns while another thread walks up its frames ends the walk early
            frame = sys._current_frames().get(self._main)
            if frame is not None and (place := self.of_frame(frame)):
                return place
        return self._of_task()

    def is_in_torch(self, frame: FrameType | None = None) -> bool:
        """Whether this frame, or the main thread's innermost one, is one of torch's. From any thread."""
        frame = frame or sys._current_frames().get(self._main)
        return frame is not None and frame.f_code.co_filename.startswith(_TORCH)

    def of_frame(self, innermost: FrameType) -> str:
        """What `describe` says, of these frames."""
        calls: list[tuple[str, int, str]] = []
        frame: FrameType | None = innermost
        while frame is not None:
            calls.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
            frame = frame.f_back
        return self.of_calls(calls)

    def _of_task(self) -> str:
        """Where the cell awaits something."""
        calls: list[tuple[str, int, str]] = []
        coroutine = None if self.task is None else self.task.get_coro()
        while (frame := getattr(coroutine, "cr_frame", None)) is not None:
            calls.insert(0, (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
            coroutine = getattr(coroutine, "cr_await", None)
        return self.of_calls(calls)

    def of_traceback(self, traceback: TracebackType | None) -> str:
        """Where an exception was raised."""
        calls: list[tuple[str, int, str]] = []
        while traceback is not None:
            code = traceback.tb_frame.f_code
            calls.insert(0, (code.co_filename, traceback.tb_lineno, code.co_name))
            traceback = traceback.tb_next
        return self.of_calls(calls)

    def of_calls(self, calls: list[tuple[str, int, str]], current: int | None = None) -> str:
        """Of calls as (file, line, function), the innermost first.

        Args:
            current: the number of the cell that they belong to; None: of the one that runs.
        """
        current = self._current if current is None else current
        called = users = ""
        for file, line, function in calls:
            if file.startswith(_OURS):
                called = function if function in _STAND_INS else called
                continue
            number = self.cells.get(file)
            if number is not None:
                cell = "cell" if number == current else f"In[{number}]"
                inside = "" if function == "<module>" else f" in {function}"
                place = f"{cell} line {line}{inside}"
                return f"{users}, from {place}" if users else place + (f", in {called}" if called else "")
            if not users and not file.startswith((*_LIBRARIES, "<")):
                users = f"{os.path.basename(file)}:{line} in {function}" + (f", in {called}" if called else "")
            elif function not in _WRAPPERS:
                called = function
        return ""
