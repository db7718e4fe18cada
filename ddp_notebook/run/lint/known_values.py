"""Values of expressions on one rank, as far as the cell defines them: plain values and unknown ones."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

Value = Any  # a plain Python value, `UNKNOWN`, `RANKED`, a `ForeseenGroup`, or one of the classes below
UNKNOWN: Final = object()
RANKED: Final = object()  # unknown, too, but it depends on the rank
OPERATORS: Final = {
    getattr(ast, node): getattr(operator, function)
    for node, function in (
        *(("Add", "add"), ("Sub", "sub"), ("Mult", "mul"), ("Div", "truediv"), ("FloorDiv", "floordiv")),
        *(("Mod", "mod"), ("BitAnd", "and_"), ("BitOr", "or_"), ("BitXor", "xor"), ("RShift", "rshift")),
        *(("USub", "neg"), ("UAdd", "pos"), ("Invert", "invert"), ("Not", "not_"), ("Is", "is_"), ("IsNot", "is_not")),
        *(("Eq", "eq"), ("NotEq", "ne"), ("Lt", "lt"), ("LtE", "le"), ("Gt", "gt"), ("GtE", "ge")),
    )
} | {ast.In: lambda item, items: item in items, ast.NotIn: lambda item, items: item not in items}
_LONGEST: Final = 10_000  # longest range that counts as known


@dataclass(frozen=True, slots=True)
class Api:
    """An imported object, by its full name: `torch.distributed.all_reduce`."""

    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Function:
    """A function of the cell."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    scopes: list[dict[str, Value]]


def is_plain(value: Value) -> bool:
    """Return whether a value is known."""
    if isinstance(value, range):
        return (value.stop - value.start) // value.step <= _LONGEST
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return value is None or isinstance(value, int | float | str)


def compute(function: Callable[..., Value], *values: Value) -> Value:
    """Return the result of a function if its arguments are known."""
    if any(map(is_ranked, values)):
        return RANKED
    if not all(map(is_plain, values)):
        return UNKNOWN
    try:
        return function(*values)
    except (TypeError, ValueError, ArithmeticError):
        return UNKNOWN  # the rank will raise the error


def is_ranked(value: Value) -> bool:
    """Return whether an unknown value depends on the rank."""
    return value is RANKED or (isinstance(value, list | tuple) and any(map(is_ranked, value)))


def strongest(values: list[Value], *order: Value) -> Value:
    """Return the first of `order` that is among the values: it decides an `and` or an `or`."""
    return next(each for each in order if each in values)


def settled(value: Value) -> Value:
    """Return the value after its assignment to a name. A list becomes unknown, because it may change through
    the name.
    """
    if isinstance(value, tuple):
        return tuple(map(settled, value))
    return UNKNOWN if isinstance(value, list) else value


def agreed(*values: Value, test: Value) -> Value:
    """Return the common value. If the values differ because of a test, or there are none, the result is unknown."""
    first = values[0] if values else UNKNOWN
    if all(value == first for value in values):
        return first
    return RANKED if test is RANKED or any(map(is_ranked, values)) else UNKNOWN
