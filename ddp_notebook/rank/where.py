"""What the main thread of a rank is in, in the words of its user: the line of the cell, and what that line called."""

from __future__ import annotations

import sys
import threading
from types import FrameType

_WRAPPERS = {"wrapper", "_wrapped_call_impl", "_call_impl", "__call__", "_fn", "inner", "decorate_context"}


class Where:
    """Knows which files are cells."""

    def __init__(self) -> None:
        self._cells: dict[str, int] = {}  # file -> number in `In [n]`
        self._current = 0

    def enter(self, file: str, execution_count: int) -> None:
        """A cell begins. Called for each: two assignments."""
        self._cells[file] = self._current = execution_count

    def describe(self) -> str:
        """Such as `"cell line 3, in all_reduce"`; empty outside of a cell's code. From any thread."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        return "" if frame is None else self._describe(frame)

    def _describe(self, innermost: FrameType) -> str:
        called = ""
        frame: FrameType | None = innermost
        while frame is not None:
            code = frame.f_code
            number = self._cells.get(code.co_filename)
            if number is not None:
                cell = "cell" if number == self._current else f"In[{number}]"
                inside = "" if code.co_name == "<module>" else f" in {code.co_name}"
                return f"{cell} line {frame.f_lineno}{inside}" + (f", in {called}" if called else "")
            if code.co_name not in _WRAPPERS:
                called = code.co_name
            frame = frame.f_back
        return ""
