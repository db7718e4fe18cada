"""Functions of torch that somebody looks at before they run, or when they have returned."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def before(owner: Any, name: str, look: Callable[..., None]) -> None:
    """Have a function called with what another one is called with, just before.

    Args:
        owner: a module or a class that has the function.
        name: the function's.
        look: called in the user's thread; torch.compile does not see it.

    Raises:
        AttributeError: there is no such function.
    """
    original = getattr(owner, name)

    @functools.wraps(original)
    def function(*args: Any, **named: Any) -> Any:
        if not torch.compiler.is_compiling():
            look(*args, **named)
        return original(*args, **named)

    setattr(owner, name, function)


def after(owner: Any, name: str, look: Callable[..., None]) -> None:
    """The same as `before`, but when the function has returned: it may have refused what it was called with."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def function(*args: Any, **named: Any) -> Any:
        out = original(*args, **named)
        if not torch.compiler.is_compiling():
            look(*args, **named)
        return out

    setattr(owner, name, function)
