"""Names of variables that a cell reads, also in the functions that it may call."""

from __future__ import annotations

import ast
import types
from collections.abc import Iterator, Mapping
from typing import Any

from ddp_notebook.stdlib import re


def names_read(code: str, namespace: Mapping[str, Any]) -> set[str]:
    """Return the names that a cell reads, and those that functions and classes of cells with these names read.

    Args:
        code: text of the cell; with magics all words count.
        namespace: the user's variables.

    Example:
        >>> sorted(names_read("y = f(x)", {"x": 1, "y": 2, "z": 3}))
        ['f', 'x']
    """
    try:
        nodes = ast.walk(ast.parse(code))
        found = {one.id for one in nodes if isinstance(one, ast.Name) and not isinstance(one.ctx, ast.Store)}
    except SyntaxError:
        found = set(re.findall(r"[^\W\d]\w*", code))
    waiting = list(found)
    while waiting:
        value = namespace.get(waiting.pop())
        for function in _functions(value):
            new = set(_names_of(function.__code__)) - found
            found |= new
            waiting += new
    return found


def _functions(value: Any) -> Iterator[types.FunctionType]:
    if isinstance(value, types.FunctionType):
        yield value
        return
    kind = value if isinstance(value, type) else type(value)
    if kind.__module__ == "__main__":
        yield from (one for one in vars(kind).values() if isinstance(one, types.FunctionType))


def _names_of(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_of(constant)
