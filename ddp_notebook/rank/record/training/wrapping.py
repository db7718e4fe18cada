"""Wrappers around functions and methods of torch, hidden from torch.compile."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

from torch._compile import _disable_dynamo

from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import contextlib, functools

_R = TypeVar("_R")

try:  # returns the callback that compiles the frames of this thread; None if there is none
    from torch._C._dynamo.eval_frame import get_eval_frame_callback

    _compiles: Callable[[], Any] = get_eval_frame_callback
except ImportError:

    def _compiles() -> Any:
        return True


def around(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace an attribute by the result of `make(attribute)`, with the same function name.

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
    """Mark a function that torch.compile calls without tracing it, although it compiles the functions that this one
    calls.

    Where torch.compile would inline the call, `hide_from_compile` prevents that. (torch's own decorator would add two
    wrapper functions.)
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def traced_as(original: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Let torch.compile trace the original function instead of the one that replaces it, also with `fullgraph=True`.

    Calls in compiled code are then not observed. It does not work for methods, whose default values Dynamo looks up in
    the new function.
    """
    function._torchdynamo_inline = original  # type: ignore[attr-defined]
    return function


def uncompiled(method: Callable[..., _R]) -> Callable[..., _R]:
    """Return the method as a function that torch.compile does not trace. A bound method cannot have the required
    attribute."""

    def call(*args: Any) -> _R:
        return method(*args)

    disabled: Callable[..., _R] = _disable_dynamo(call)

    def call_uncompiled(*args: Any) -> _R:
        if _compiles() is None:  # otherwise four functions of torch run, with cold caches
            return method(*args)
        return disabled(*args)

    call_uncompiled._torchdynamo_disable = True  # type: ignore[attr-defined]  # for the case that it is traced itself
    return call_uncompiled


@functools.cache  # a rank inherits it from the process that has forked it
def hide_from_compile() -> None:
    """Let torch.compile skip this package's code, which it would trace together with a model."""
    with contextlib.suppress(ImportError, AttributeError):
        trace_rules = importlib.import_module("torch._dynamo.trace_rules")
        trace_rules.add("ddp_notebook")
