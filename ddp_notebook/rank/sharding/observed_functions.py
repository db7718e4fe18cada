"""Hooks that call a function before or after a function of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ddp_notebook.stdlib import functools, logging

_log = logging.getLogger(__name__)


def before(owner: Any, name: str, look: Callable[..., None]) -> None:
    """Call `look` with the same arguments before each call of a function.

    Args:
        owner: module or class with the function.
        name: name of the function.
        look: called in the user's thread. Its exceptions are logged. It is not called while torch.compile traces.

    Raises:
        AttributeError: the function does not exist.
    """
    original = getattr(owner, name)

    @functools.wraps(original)
    def function(*args: Any, **named: Any) -> Any:
        if not torch.compiler.is_compiling():
            _call(look, args, named)
        return original(*args, **named)

    function._torchdynamo_inline = original  # type: ignore[attr-defined]  # torch.compile traces that
    setattr(owner, name, function)


def after(owner: Any, name: str, look: Callable[..., None]) -> None:
    """Like `before`, but call `look` after the function has returned, so not after an error."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def function(*args: Any, **named: Any) -> Any:
        out = original(*args, **named)
        if not torch.compiler.is_compiling():
            _call(look, args, named)
        return out

    function._torchdynamo_inline = original  # type: ignore[attr-defined]
    setattr(owner, name, function)


def _call(look: Callable[..., None], args: Any, named: Any) -> None:
    try:
        look(*args, **named)
    except Exception:  # for example raised by an object with special attribute access
        _log.info("a call was not looked at", exc_info=True)
