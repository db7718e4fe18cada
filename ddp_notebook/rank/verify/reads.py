"""Find the variables that a step reads before it assigns them, such as a hidden state of the step before."""

from __future__ import annotations

import ast
import dis
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch


def names_read(source: str, namespace: Mapping[str, Any]) -> set[str]:
    """Return the names that code reads before it assigns them, with those that its functions and classes read.

    Args:
        source: text of the code.
        namespace: the user's variables.

    Example:
        >>> sorted(names_read("h = h.detach(); out, h = model(x, h); loss = f(out)", {}))
        ['f', 'h', 'model', 'x']
    """
    found = _read(ast.parse(source).body, set())
    waiting = list(found)
    while waiting:
        for function in _functions(namespace.get(waiting.pop())):
            new = set(_globals_of(function.__code__)) - found
            found |= new
            waiting += new
    return found


def _read(statements: Sequence[ast.stmt], assigned: set[str]) -> set[str]:
    """Return the names that statements read, and add to `assigned` those that they certainly assign."""
    found: set[str] = set()
    for one in statements:
        if isinstance(one, ast.With):
            found |= _loaded(one.items, assigned) | _read(one.body, assigned)
        elif isinstance(one, ast.For):
            found |= _loaded([one.iter], assigned)
            found |= _read([*one.body, *one.orelse], assigned | _stored(one.target))
        elif isinstance(one, ast.If | ast.While):
            found |= _loaded([one.test], assigned)
            found |= _read(one.body, set(assigned)) | _read(one.orelse, set(assigned))
        elif isinstance(one, ast.FunctionDef | ast.ClassDef):
            found |= _loaded([one], assigned)
            assigned.add(one.name)
        else:
            found |= _loaded([one], assigned)
            if isinstance(one, ast.AugAssign):
                found |= _stored(one.target) - assigned
            assigned |= _stored(one)
    return found


def _loaded(nodes: Sequence[ast.AST], assigned: set[str]) -> set[str]:
    everything = [part for node in nodes for part in ast.walk(node)]
    own = {name for part in everything if isinstance(part, ast.comprehension) for name in _stored(part.target)}
    own |= {part.arg for part in everything if isinstance(part, ast.arg)}
    names = {part.id for part in everything if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)}
    return names - own - assigned


def _stored(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}


def _functions(value: Any) -> Iterator[types.FunctionType]:
    if isinstance(value, types.FunctionType):
        yield value
        return
    kinds = {value} if isinstance(value, type) else {type(value)}
    if isinstance(value, torch.nn.Module):
        kinds = {type(one) for one in torch.nn.Module.modules(value)}
    for kind in kinds:
        if kind.__module__ == "__main__":
            yield from (one for one in vars(kind).values() if isinstance(one, types.FunctionType))


def _globals_of(code: types.CodeType) -> Iterator[str]:
    yield from (one.argval for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _globals_of(constant)
