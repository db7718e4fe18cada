"""What is wrapped around functions and methods of torch, hidden from torch.compile."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch._compile import _disable_dynamo

from ddp_notebook.stdlib import contextlib, functools

try:  # what looks at each frame of this thread to compile it; None: nothing does
    from torch._C._dynamo.eval_frame import get_eval_frame_callback

    _compiles: Callable[[], Any] = get_eval_frame_callback
except ImportError:

    def _compiles() -> Any:
        return True


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


def passed_over(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which torch.compile calls as it is, and goes on with what that calls. Where it is called and not
    traced, `hide_from_compile` says so. (torch's own decorator puts two functions around it.)"""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def uncompiled(method: Callable[..., None]) -> Callable[..., None]:
    """The method as a function that torch.compile leaves alone. A bound method takes no attributes, which it needs."""

    def call(*args: Any) -> None:
        method(*args)

    disabled = _disable_dynamo(call)

    def call_uncompiled(*args: Any) -> None:
        if _compiles() is None:  # else through four functions of torch's, which no cache holds in the middle of a step
            method(*args)
        else:
            disabled(*args)

    call_uncompiled._torchdynamo_disable = True  # type: ignore[attr-defined]  # where it is traced itself
    return call_uncompiled


@functools.cache  # a rank has it from the process that has forked it
def hide_from_compile() -> None:
    """Have torch.compile leave our code alone, which it would trace beside a model."""
    with contextlib.suppress(ImportError, AttributeError):
        trace_rules = importlib.import_module("torch._dynamo.trace_rules")
        trace_rules.add("ddp_notebook")
