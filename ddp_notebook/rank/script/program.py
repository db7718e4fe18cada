"""Run another program in this process like Python: a script, or with `-m` a module."""

from __future__ import annotations

import runpy
import sys
from types import ModuleType, TracebackType
from typing import Any

from ddp_notebook.stdlib import itertools, os

_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep


def run(arguments: list[str]) -> None:
    """Run a program to its end.

    Args:
        arguments: `SCRIPT [ARGUMENT ...]` or `-m MODULE [ARGUMENT ...]`.

    Raises:
        BaseException: any error of the program. The traceback that Python prints has no frames of this package.
    """
    sys.excepthook = _show
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = arguments
    path = arguments[0]
    if not getattr(sys.flags, "safe_path", False):  # `-m ddp_notebook...` has put the working directory here
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec")
    # Keep the module: threads and exit handlers still need its names, which `runpy.run_path` would clear.
    module = ModuleType("__main__")
    module.__dict__.update(__file__=path, __builtins__=__builtins__, __cached__=None)
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


def _show(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> Any:
    """Print an exception like Python, without the frames of this package."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = _without_ours(one.__traceback__)
            left += [one.__cause__, one.__context__]
    sys.__excepthook__(kind, error, error.__traceback__)


def _without_ours(at: TracebackType | None) -> TracebackType | None:
    """Remove the frames of this package from a traceback, including the last ones, which call torch for the program.

    An error that only has frames of this package keeps them.
    """
    every: list[TracebackType] = []
    while at is not None:
        every.append(at)
        at = at.tb_next
    frames = [one for one in every if not _is_ours(one.tb_frame.f_code.co_filename)] or every
    for one, following in itertools.zip_longest(frames, frames[1:]):
        one.tb_next = following
    return frames[0] if frames else None


def _is_ours(file: str) -> bool:
    return file.startswith((_OURS, "<frozen runpy>")) or file == runpy.__file__
