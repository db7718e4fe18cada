"""The values of expressions on one rank, as far as the cell alone tells: plain ones, and those that are not known."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

Value = Any  # a plain value of Python, `UNKNOWN`, `RANKED`, a `Group`, or one of the classes below
UNKNOWN: Final = object()
RANKED: Final = object()  # not known either, but it depends on the rank
OPERATORS: Final = {
    getattr(ast, node): getattr(operator, function)
    for node, function in (
        *(("Add", "add"), ("Sub", "sub"), ("Mult", "mul"), ("Div", "truediv"), ("FloorDiv", "floordiv")),
        *(("Mod", "mod"), ("BitAnd", "and_"), ("BitOr", "or_"), ("BitXor", "xor"), ("RShift", "rshift")),
        *(("USub", "neg"), ("UAdd", "pos"), ("Invert", "invert"), ("Not", "not_"), ("Is", "is_"), ("IsNot", "is_not")),
        *(("Eq", "eq"), ("NotEq", "ne"), ("Lt", "lt"), ("LtE", "le"), ("Gt", "gt"), ("GtE", "ge")),
    )
} | {ast.In: lambda item, items: item in items, ast.NotIn: lambda item, items: item not in items}
_LONGEST: Final = 10_000  # of a range whose elements are looked at


@dataclass(frozen=True, slots=True)
class Api:
    """Something that was imported, by its full name: `torch.distributed.all_reduce`."""

    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Function:
    """A function of the cell."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    scopes: list[dict[str, Value]]


def is_plain(value: Value) -> bool:
    """Whether a value is known."""
    if isinstance(value, range):
        return (value.stop - value.start) // value.step <= _LONGEST
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return value is None or isinstance(value, int | float | str)


def compute(function: Callable[..., Value], *values: Value) -> Value:
    """The result of a function, if its arguments are known."""
    if any(map(is_ranked, values)):
        return RANKED
    if not all(map(is_plain, values)):
        return UNKNOWN
    try:
        return function(*values)
    except (TypeError, ValueError, ArithmeticError):
        return UNKNOWN  # the rank will say so


def is_ranked(value: Value) -> bool:
    """Whether a value that is not known depends on the rank."""
    return value is RANKED or (isinstance(value, list | tuple) and any(map(is_ranked, value)))


def strongest(values: list[Value], *order: Value) -> Value:
    """The first of `order` that is among the values: it decides an `and` or an `or`."""
    return next(each for each in order if each in values)


def settled(value: Value) -> Value:
    """The value once it has a name: a list may change whenever somebody uses the name, so it is not known."""
    if isinstance(value, tuple):
        return tuple(map(settled, value))
    return UNKNOWN if isinstance(value, list) else value


def agreed(*values: Value, test: Value) -> Value:
    """The value that all of them are; not known if they differ because of a test, or if there are none."""
    first = values[0] if values else UNKNOWN
    if all(value == first for value in values):
        return first
    return RANKED if test is RANKED or any(map(is_ranked, values)) else UNKNOWN
