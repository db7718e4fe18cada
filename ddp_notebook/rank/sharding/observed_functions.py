"""Functions of torch that somebody looks at before they run, or when they have returned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ddp_notebook.stdlib import functools, logging

_log = logging.getLogger(__name__)


def before(owner: Any, name: str, look: Callable[..., None]) -> None:
    """Have a function called with what another one is called with, just before.

    Args:
        owner: a module or a class that has the function.
        name: the function's.
        look: called in the user's thread, whose call goes on if it raises; torch.compile does not see it.

    Raises:
        AttributeError: there is no such function.
    """
    original = getattr(owner, name)

    @functools.wraps(original)
    def function(*args: Any, **named: Any) -> Any:
        if not torch.compiler.is_compiling():
            _call(look, args, named)
        return original(*args, **named)

    setattr(owner, name, function)


def after(owner: Any, name: str, look: Callable[..., None]) -> None:
    """The same as `before`, but when the function has returned: it may have refused what it was called with."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def function(*args: Any, **named: Any) -> Any:
        out = original(*args, **named)
        if not torch.compiler.is_compiling():
            _call(look, args, named)
        return out

    setattr(owner, name, function)


def _call(look: Callable[..., None], args: Any, named: Any) -> None:
    try:
        look(*args, **named)
    except Exception:  # such as of a class that refuses to be looked at
        _log.info("a call was not looked at", exc_info=True)
