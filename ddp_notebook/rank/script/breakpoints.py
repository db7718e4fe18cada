"""`breakpoint()` in a script without a terminal, such as a rank of a torchrun job that a notebook has started."""

from __future__ import annotations

import pdb
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ddp_notebook.stdlib import functools, os

_NO_TERMINAL = (
    "breakpoint() reads its commands from a terminal, and this rank has none. A notebook cannot type them: it only "
    "observes torchrun jobs. Run the code in a cell, where breakpoint() works (%ddp_start), or print the values"
)


def refuse_without_terminal() -> None:
    """Let `breakpoint()`, `pdb.set_trace` and `dist.breakpoint` raise an error if the process has no terminal.

    pdb itself would read the end of the input, and end the process without a reason. `dist.breakpoint` would raise the
    timeouts of all groups before that.
    """
    sys.breakpointhook = _checked(sys.breakpointhook)
    pdb.set_trace = _checked(pdb.set_trace)
    if hasattr(dist, "breakpoint"):
        dist.breakpoint = _checked(dist.breakpoint)


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def checked(*arguments: Any, **named: Any) -> Any:
        if os.environ.get("PYTHONBREAKPOINT") in (None, "") and not _has_terminal():
            raise RuntimeError(_NO_TERMINAL)
        return function(*arguments, **named)

    return checked


def _has_terminal() -> bool:
    try:
        return os.isatty(0)
    except OSError:  # closed
        return False
