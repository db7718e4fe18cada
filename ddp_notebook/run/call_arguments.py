"""Name the wrong argument of a call of the public API, after the call has failed with a Python error.

Successful calls have no overhead. An error with another cause is not changed.
"""

from __future__ import annotations

import difflib
import inspect
import numbers
import os
import reprlib
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ddp_notebook.errors import DDPNotebookError, UsageError

# Argument names of other libraries, such as multiprocessing and torchrun, that users may write for arguments of this
# package.
_ALIASES: Mapping[str, str] = {
    **dict.fromkeys(("n", "nprocs", "nproc", "num_ranks", "nranks", "ranks", "size", "world", "workers"), "world_size"),
    **dict.fromkeys(("nproc_per_node", "num_processes", "np"), "world_size"),
    **dict.fromkeys(("devices", "device", "device_ids"), "gpus"),
    **dict.fromkeys(("nodes", "ssh"), "hosts"),
    **dict.fromkeys(("file", "filename"), "path"),
}
_MOST_NAMES = 8
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60
_WORDS: Mapping[Any, str] = {
    str: "text",
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    type(None): "None",
    Mapping: "a dict",
    Sequence: "a sequence",
    Callable: "a function",
    os.PathLike: "a path",
}


def wrong_argument(
    function: Callable[..., Any], arguments: Sequence[Any], named: Mapping[str, Any], error: Exception
) -> UsageError | None:
    """Return an error that names the wrong argument of a failed call, or None if all arguments are valid.

    Args:
        function: the called function of the public API.
        arguments, named: arguments of the call.
        error: error that the call raised.

    Example:
        >>> def start(world_size: int | None = None, *, gpus: str | None = None): ...
        >>> wrong_argument(start, (), {"n": 2}, TypeError())
        UsageError("start() has no argument 'n'; did you mean world_size?")
        >>> wrong_argument(start, (2,), {"gpus": 5}, TypeError())
        UsageError('gpus must be text or None, got 5')
    """
    if isinstance(error, DDPNotebookError):
        return None
    signature = inspect.signature(function)
    try:
        given = signature.bind(*arguments, **named).arguments
    except TypeError as unbound:
        return UsageError(_unbound(function.__name__, signature, arguments, named, unbound))
    for name, value in given.items():
        parameter = signature.parameters[name]
        kind = _kind(function, parameter)
        values = [value]
        if parameter.kind is parameter.VAR_POSITIONAL:
            values = list(value)
        elif parameter.kind is parameter.VAR_KEYWORD:
            values = list(value.values())
        for one in values:
            if not fits(one, kind):
                return UsageError(f"{name} must be {in_words(kind)}, got {short(one)}")
    return None


def no_argument(function: str, wrong: str, names: Iterable[str]) -> str:
    """Return a sentence about a keyword argument that a function does not have.

    Args:
        function: name of the function.
        wrong: name of the keyword.
        names: names of the function's arguments.

    Example:
        >>> no_argument("start", "backends", ["world_size", "backend"])
        "start() has no argument 'backends'; did you mean backend?"
    """
    names = [*names]
    if (alias := _ALIASES.get(wrong.lower())) in names:
        near: str | None = alias
    else:
        parts = [name for name in names if min(len(name), len(wrong)) > 2 and (name in wrong or wrong in name)]
        near = next(iter(difflib.get_close_matches(wrong, names, 1) or parts), None)
    if near is not None:
        return f"{function}() has no argument {wrong!r}; did you mean {near}?"
    if not names:
        return f"{function}() has no argument {wrong!r}; it takes none"
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"{function}() has no argument {wrong!r}; its arguments are {', '.join(names[:_MOST_NAMES])}{more}"


def fits(value: Any, kind: Any) -> bool:
    """Return whether a value may have the annotated type. Elements of containers are not checked.

    Example:
        >>> fits(2, int | None), fits("2", int | None), fits(True, int), fits(2, float), fits({}, Mapping[str, int])
        (True, False, False, True, True)
    """
    origin = typing.get_origin(kind) or kind
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, one) for one in typing.get_args(kind))
    if origin is typing.Literal:
        return any(value is one or (type(value) is type(one) and value == one) for one in typing.get_args(kind))
    if origin is float:
        return isinstance(value, numbers.Real) and not isinstance(value, bool)  # accepts NumPy numbers
    if origin is int:  # accepts NumPy numbers
        return hasattr(value, "__index__") and not isinstance(value, bool) and not hasattr(value, "__len__")
    if kind is Any or origin is object or not isinstance(origin, type):
        return True
    return isinstance(value, origin)


def short(value: Any) -> str:
    """Return a value as short text for a message, even if its `__repr__` raises."""
    return _SHORT.repr(value)


def _kind(function: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """Return the annotated type. Return Any if there is none or it is imported for type checkers only."""
    kind = parameter.annotation
    if not isinstance(kind, str):
        return Any if kind is parameter.empty else kind
    try:
        return eval(kind, inspect.unwrap(function).__globals__)  # an annotation of this package
    except NameError:
        return Any


def _unbound(
    function: str,
    signature: inspect.Signature,
    arguments: Sequence[Any],
    named: Mapping[str, Any],
    error: TypeError,
) -> str:
    """Return a sentence about a call whose arguments do not fit the signature."""
    own = [one for one in signature.parameters.values() if one.name != "self"]
    names = [one.name for one in own if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD, one.POSITIONAL_ONLY)]
    for one in named:
        if one not in names and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in own):
            return no_argument(function, one, names)
    in_order = [one.name for one in own if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    count = len(arguments) - ("self" in signature.parameters)
    if count > len(in_order) and not any(one.kind is one.VAR_POSITIONAL for one in own):
        others = [name for name in names if name not in in_order]
        by_name = f"; write others by name, as {others[0]}=..." if others else ""
        most = f"only {', '.join(in_order)}" if in_order else "no value"
        return f"{function}() takes {most} without a name, got {count} values{by_name}"
    return f"{function}(): {error}"


def in_words(kind: Any) -> str:
    """Return a description of an annotated type.

    Example:
        >>> in_words(str | None)
        'text or None'
    """
    origin = typing.get_origin(kind) or kind
    if origin in (typing.Union, types.UnionType):
        words = list(dict.fromkeys(in_words(one) for one in typing.get_args(kind)))
        return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
    if origin is typing.Literal:
        return " or ".join(repr(one) for one in typing.get_args(kind))
    return _WORDS.get(origin) or str(getattr(origin, "__name__", kind))
