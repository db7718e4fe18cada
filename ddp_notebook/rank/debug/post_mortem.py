"""The failure of the last cell, for `%ddp_debug`. Its frames are kept until the rank's next cell begins.

After an error of missing memory no frame is kept, because the next cell needs the memory that the frames hold. Then the
failure is described: lines, and the type and size of each variable.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

import torch

from ddp_notebook.rank.cell.current_line import LIBRARIES, OURS, CurrentLine
from ddp_notebook.rank.cell.exceptions import chain, first_line
from ddp_notebook.rank.cell.isolation import clear_frames
from ddp_notebook.records.units import size
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import os

_MOST_FRAMES = 20
_MOST_NAMES = 40


class PostMortem:
    """Failure of the last cell of this rank.

    Args:
        where: describes places, and knows the files of cells.
    """

    def __init__(self, where: CurrentLine) -> None:
        self.error = ""  # type and message of the failure; "": the last cell has not failed
        self.lines: list[str] = []  # description of a failure whose frames are not kept
        self._where = where
        self._tracebacks: list[TracebackType] = []  # tracebacks of the failure and its causes

    def note(self, error: BaseException) -> bool:
        """Note the failure of a cell. Return whether its frames are kept."""
        self.forget()
        tracebacks = [one.__traceback__ for one in chain(error) if one.__traceback__ is not None]
        if not tracebacks or isinstance(error, SystemExit | SyntaxError):
            return False
        if not any(_is_users(frame) for frame, _ in _frames(tracebacks[0])):
            return False
        self.error = first_line(error)
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            self.lines = list(self._described(tracebacks[0]))
            return False
        self._tracebacks = tracebacks
        return True

    def forget(self) -> None:
        """Release the frames of the failure, and the memory that their variables hold."""
        for at in self._tracebacks:
            clear_frames(at)
        self._tracebacks = []
        self.error, self.lines = "", []

    @property
    def traceback(self) -> TracebackType | None:
        """The kept frames of the failure; None if none are kept."""
        return self._tracebacks[0] if self._tracebacks else None

    def _described(self, at: TracebackType) -> Iterator[str]:
        frames = [(frame, line) for frame, line in _frames(at) if _is_users(frame)]
        for frame, line in frames[-_MOST_FRAMES:]:
            code = frame.f_code
            place = self._where.of_calls([(code.co_filename, line, code.co_name)])
            yield place or f"{os.path.basename(code.co_filename)}:{line} in {code.co_name}"
            is_cell = code.co_filename in self._where.cells and frame.f_globals is frame.f_locals
            names = set(code.co_names) if is_cell else None  # a cell's frame has all variables of the session
            values = [(name, value) for name, value in frame.f_locals.items() if names is None or name in names]
            for name, value in values[:_MOST_NAMES]:
                yield f"  {name}: {describe(value)}"


def describe(value: Any) -> str:
    """Return the type of a value; for a tensor also its shape, device and size.

    Example:
        >>> describe(torch.zeros(2, 3)), describe([1])
        ('float32 (2, 3) on cpu, 24 B', 'list')
    """
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    dtype = str(value.dtype).removeprefix("torch.")
    nbytes = value.nelement() * value.element_size()
    return f"{dtype} {tuple(value.shape)} on {value.device}, {size(nbytes)}"


def innermost_of_user(stack: list[tuple[FrameType, int]]) -> int:
    """Return the number of the innermost frame of the user's code."""
    users = [number for number, (frame, _) in enumerate(stack) if _is_users(frame)]
    return users[-1] if users else len(stack) - 1


def _frames(at: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while at is not None:
        yield at.tb_frame, at.tb_lineno
        at = at.tb_next


def _is_users(frame: FrameType) -> bool:
    return not frame.f_code.co_filename.startswith((OURS, *LIBRARIES, "<"))
