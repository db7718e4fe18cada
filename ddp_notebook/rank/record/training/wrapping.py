"""What is wrapped around functions and methods of torch, hidden from torch.compile, and how deep their callers are."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch._compile import _disable_dynamo


def around(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put in place of an attribute what `make` makes of it, under its name.

    Example:
        >>> class Owner:
        ...     def double(self, x): return 2 * x
        >>> around(Owner, "double", lambda original: lambda self, x: original(self, x) + 1)
        >>> Owner().double(3), Owner.double.__name__
        (7, 'double')
    """
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(make(original)))


def uncompiled(method: Callable[..., None]) -> Callable[..., None]:
    """The method as a function that torch.compile leaves alone. A bound method takes no attributes, which it needs."""

    def call(*args: Any) -> None:
        method(*args)

    return _disable_dynamo(call)


@functools.cache  # a rank has it from the process that has forked it
def hide_from_compile() -> None:
    """Have torch.compile leave our code alone, which it would trace beside a model."""
    with contextlib.suppress(ImportError, AttributeError):
        trace_rules = importlib.import_module("torch._dynamo.trace_rules")
        trace_rules.add("ddp_notebook")


def depth_of_caller() -> int:
    """How many frames are below the caller's."""
    frame: FrameType | None = sys._getframe(1)
    depth = 0
    while frame is not None:
        depth, frame = depth + 1, frame.f_back
    return depth
