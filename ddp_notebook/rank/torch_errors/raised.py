"""Facts about an error: its text, the function that raised it, and the local variables on the way."""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from ddp_notebook.rank.cell.current_line import OURS
from ddp_notebook.rank.cell.exceptions import known_words, words
from ddp_notebook.stdlib import os, re

_TORCH = os.path.dirname(torch.__file__) + os.sep
_MODULES = ("builtins", "pickle", "_pickle", "torch", "_queue")
# A frame whose last instruction is none of these has called a function in C, which raised the error.
_OF_PYTHON = ("RAISE_VARARGS", "RERAISE", "YIELD_VALUE", "RESUME", "SEND", "FOR_ITER")
_UNSHARED = 3  # references to a dictionary that only its frame has: of the frame, a local variable and an argument
_IN_WORKER = re.compile(r"Caught (?P<kind>\w+) in DataLoader worker process \d+\.\nOriginal Traceback .*?\n", re.DOTALL)
_FRAME = re.compile(r'^  File "(?P<file>.*)", line \d+, in (?P<function>\S+)$', re.MULTILINE)


@dataclass(frozen=True)
class Raised:
    """An error of torch.

    Args:
        kind: name of its class.
        text: its message.
        where: the function of torch that raised it, such as `"torch.distributed.distributed_c10d:all_gather"`; "" if
            C++ code raised it in a call of the user's code.
        frames: frames of its traceback, the outermost first.
        ranks: ranks on which it was raised, if it was collected from several ranks.
        error: the exception.
    """

    kind: str
    text: str
    where: str
    frames: Sequence[FrameType] = ()
    ranks: Sequence[int] = ()
    error: BaseException | None = None

    def local(self, function: str, name: str) -> Any:
        """Return a local variable of the innermost frame of a function.

        Args:
            function: pattern of the frame's place, such as `"distributed_c10d:all_gather$"`.
            name: name of the variable.

        Returns:
            The variable; None if it does not exist.
        """
        for frame in reversed(self.frames):
            if re.search(function, _place(frame)):
                return variables(frame).get(name)
        return None

    def has(self, function: str) -> bool:
        """Return whether the traceback has a frame of this function."""
        return any(re.search(function, _place(frame)) for frame in self.frames)

    @property
    def operation(self) -> str:
        """Return the name of the function in `torch.distributed` that the user has called; "" if it is none."""
        for frame in self.frames:
            if frame.f_globals.get("__name__") == "torch.distributed.distributed_c10d":
                return frame.f_code.co_name
        return ""

    def argument(self, *names: str) -> Any:
        """Return the first of these arguments that the called function of `torch.distributed` has."""
        for frame in self.frames:
            if frame.f_globals.get("__name__") == "torch.distributed.distributed_c10d":
                return next((variables(frame)[name] for name in names if name in variables(frame)), None)
        return None


def variables(frame: FrameType) -> Mapping[str, Any]:
    """Return the local variables of a frame. The frame itself keeps no second reference to them."""
    found = frame.f_locals
    if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return found  # the namespace of a module or a class
    values = dict(found)
    # Before Python 3.13 this is a copy that the frame keeps, even after `frame.clear`. `locals()` returns the same one.
    if sys.version_info < (3, 13) and sys.getrefcount(found) == _UNSHARED:
        found.clear()
    return values


def find(error: BaseException) -> Iterator[Raised]:
    """Yield the facts about an error that torch has raised; nothing if user code or this package has raised it."""
    if not _is_known(type(error)):
        return
    frames, last = _frames(error)
    if not frames:
        return
    place = _place(frames[-1])
    is_of_torch = place.startswith(("torch.", "torch:"))
    if type(error).__name__ == "CheckpointException":
        yield from _of_ranks(error, frames)
    elif is_of_torch and (inner := _in_worker(error)) is not None:
        yield inner
    elif is_of_torch or (last not in _OF_PYTHON):
        text = known_words(error) or words(error)
        yield Raised(type(error).__name__, text, place if is_of_torch else "", frames, error=error)


def _is_known(kind: type) -> bool:
    """Return whether an exception class is one of Python or torch, so that its methods are not the user's."""
    return kind.__module__.partition(".")[0] in _MODULES


def _frames(error: BaseException) -> tuple[list[FrameType], str]:
    """Return the frames of an error without those of this package at its end, and the name of the last instruction.

    No frames are returned if a statement of this package has raised the error, except for errors of stores: waits of
    this package raise them in place of torch.
    """
    last = ""
    at, found = error.__traceback__, []
    while at is not None:
        found.append((at.tb_frame, at.tb_lasti))
        at = at.tb_next
    is_of_store = type(error).__name__.startswith("Dist")
    if found and _is_ours(found[-1][0]) and _instruction(*found[-1]) in _OF_PYTHON and not is_of_store:
        return [], ""
    while found and _is_ours(found[-1][0]):
        found.pop()
    frames = [frame for frame, _ in found if not _is_ours(frame)]
    if found:
        last = _instruction(*found[-1])
    return frames, last


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(OURS)


def _instruction(frame: FrameType, at: int) -> str:
    code = frame.f_code.co_code
    return dis.opname[code[at]] if 0 <= at < len(code) else ""


def _place(frame: FrameType) -> str:
    return f"{frame.f_globals.get('__name__', '')}:{frame.f_code.co_qualname}"


def _place_in_file(file: str, function: str) -> str:
    """Return the place of a function by its file; "" if that is not a file of torch."""
    if not file.startswith(_TORCH):
        return ""
    module = file.removeprefix(_TORCH).removesuffix(".py").replace(os.sep, ".")
    return f"torch.{module}:{function}"


def _of_ranks(error: Any, frames: Sequence[FrameType]) -> Iterator[Raised]:
    """Yield the errors that a checkpoint has collected from the ranks; equal ones once."""
    ranks: dict[tuple[str, str, str], list[int]] = {}
    for rank, (one, stack) in sorted(error.failures.items()):
        if not _is_known(type(one)) or type(stack).__name__ != "StackSummary" or not stack:
            continue
        where = _place_in_file(stack[-1].filename, stack[-1].name)
        if where:
            ranks.setdefault((type(one).__name__, words(one), where), []).append(rank)
    for (kind, text, where), which in ranks.items():
        yield Raised(kind, text, where, frames, which, error)


def _in_worker(error: BaseException) -> Raised | None:
    """Return the error of a DataLoader's worker, which torch raises with the traceback as its text."""
    text = words(error)
    begin = _IN_WORKER.match(text)
    found = list(_FRAME.finditer(text)) if begin is not None else []
    if begin is None or not found:
        return None
    _, separator, message = text[found[-1].end() :].rpartition(f"\n{begin['kind']}: ")
    where = _place_in_file(found[-1]["file"], found[-1]["function"])
    return Raised(begin["kind"], message, where or "-", error=error) if separator else None
