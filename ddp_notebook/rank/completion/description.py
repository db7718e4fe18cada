"""Help text of a value, as Shift-Tab shows it: type, signature, docstring, file and source.

Only stored data are read, see `static_lookup`. So values are described without their contents, except numbers and
short text.
"""

from __future__ import annotations

import builtins
import inspect
import types
from typing import Any

import torch

from ddp_notebook.rank.completion.names import type_of
from ddp_notebook.rank.variables.static_lookup import (
    BUILTIN,
    UNKNOWN,
    Known,
    called_function,
    class_attribute,
    inherits,
    instance_attributes,
    is_one_of,
    type_name,
)
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import re

_SHOWN = (bool, int, float, complex, type(None), torch.dtype, torch.device, torch.Size)
_BUILTIN_TYPES = (type(None), *(one for one in vars(builtins).values() if type(one) is type))
_CELL = "/ipykernel_"  # in the file name of a cell's code
_MOST_CHARS = 200
_MOST_TEXT = 20_000
_SELF = re.compile(r"^\((\$?self|\$module|\$type)(, /)?(, )?")


def describe(found: Known, path: str, detail: int = 0) -> str:
    """Return the help text of a value.

    Args:
        found: the value, or only its type.
        path: the name as written in the cell.
        detail: 1 adds the source of a function or class.

    Example:
        >>> def step(x, scale=2.0):
        ...     "Take a step."
        >>> print(describe(Known.of(step), "step").partition("File:")[0])
        Signature: step(x, scale=2.0)
        Docstring: Take a step.
        <BLANKLINE>
    """
    value = found.value if found.has_value else found.kind
    rows: dict[str, str] = {}
    function = called_function(value)
    name = path.rpartition(".")[2]
    if function is not None:
        rows["Signature"] = signature(function, name, is_method=inherits(type(value), type))
    rows["Type"] = type_of(value) if found.has_value and function is not None else type_name(found.kind)
    if function is None:
        rows["Value"] = _contents(value) if found.has_value else ""
    if function is not None or not is_one_of(found.kind, _BUILTIN_TYPES):
        rows["Docstring"] = _docstring(value if function is not None else found.kind)
    code = function.__code__ if type(function) is types.FunctionType else None
    if code is not None and _CELL not in code.co_filename:
        rows["File"] = code.co_filename
    if detail and code is not None:
        rows["Source"] = _source(value if type(value) is type else function)
    order = ("Signature", "Value", "Docstring", "Source", "File", "Type")
    return "\n".join(_row(row, rows[row]) for row in order if rows.get(row))


def signature(function: Any, name: str, *, is_method: bool = False) -> str:
    """Return the signature of a function. Only default values of plain types are shown.

    Args:
        is_method: leave out the first parameter.
    """
    if type(function) is not types.FunctionType:
        text = function.__text_signature__ if is_one_of(type(function), BUILTIN) else None
        return f"{name}{_SELF.sub('(', text)}" if type(text) is str else ""
    code = function.__code__
    count, only = code.co_argcount, code.co_kwonlyargcount
    names = code.co_varnames
    defaults = function.__defaults__ or ()
    of_keywords = function.__kwdefaults__ or {}
    parameters = [
        one if (at := i - (count - len(defaults))) < 0 else f"{one}={_plain(defaults[at])}"
        for i, one in enumerate(names[:count])
    ]
    if code.co_posonlyargcount:
        parameters.insert(code.co_posonlyargcount, "/")
    rest = count + only
    if code.co_flags & inspect.CO_VARARGS:
        parameters.append(f"*{names[rest]}")
        rest += 1
    elif only:
        parameters.append("*")
    parameters += [f"{one}={_plain(of_keywords[one])}" if one in of_keywords else one for one in names[count:][:only]]
    if code.co_flags & inspect.CO_VARKEYWORDS:
        parameters.append(f"**{names[rest]}")
    if (is_method or names[:1] in (("self",), ("cls",))) and parameters:
        del parameters[: 2 if parameters[1:2] == ["/"] else 1]
    return f"{name}({', '.join(parameters)})"


def _docstring(value: Any) -> str:
    if inherits(type(value), type):
        text = class_attribute(value, "__doc__")
    elif is_one_of(type(value), (types.FunctionType, *BUILTIN, types.MethodType)):
        text = value.__doc__
    else:
        text = instance_attributes(value).get("__doc__", UNKNOWN)
    return inspect.cleandoc(text)[:_MOST_TEXT] if type(text) is str else ""


def _contents(value: Any) -> str:
    """Return the contents of plain values, and the form of tensors and containers."""
    kind = type(value)
    if is_one_of(kind, _SHOWN):
        return repr(value)[:_MOST_CHARS]
    if kind is str:
        return repr(value if len(value) <= _MOST_CHARS else f"{value[:_MOST_CHARS]}...")
    if is_one_of(kind, (torch.Tensor, torch.nn.Parameter)):
        grad = ", requires_grad" if value.requires_grad else ""
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)} on {value.device}{grad}"
    if is_one_of(kind, (list, tuple, dict, set, frozenset, bytes, bytearray)):
        return f"{len(value)} items" if not is_one_of(kind, (bytes, bytearray)) else f"{len(value)} bytes"
    return ""


def _plain(value: Any) -> str:
    if is_one_of(type(value), _SHOWN) or type(value) is str:
        return repr(value)[:_MOST_CHARS]
    return "..."


def _source(value: Any) -> str:
    try:
        return inspect.getsource(value)[:_MOST_TEXT]
    except (OSError, TypeError):
        return ""


def _row(name: str, text: str) -> str:
    return f"{name}:\n{text}" if "\n" in text else f"{name}: {text}"
