"""Find out from the text of a step if its loop divides the loss by the number of micro-steps."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

_CLOSE = 1e-6
_OF_WORLD = ("world_size", "get_world_size")


def factors(text: str) -> tuple[list[str], list[str]]:
    """Return the expressions that multiply or divide a value in statements, and the names of the called functions.

    A division is returned as "1 / divisor".

    Args:
        text: the statements and the loss.

    Example:
        >>> factors("loss = f(model(x), y) / 4"), factors("n = 4; f(out, y) / n")
        ((['1 / 4'], ['f', 'model']), (['1 / 4'], ['f']))
    """
    tree = ast.parse(text)
    known = {
        target.id: one.value
        for one in ast.walk(tree)
        if isinstance(one, ast.Assign)
        for target in one.targets
        if isinstance(target, ast.Name) and isinstance(one.value, ast.Constant | ast.Name)
    }
    called = {one.func.id: one.func for one in ast.walk(tree) if isinstance(one, ast.Call) and _is_name(one.func)}
    names = {ast.unparse(known.get(name, func)) for name, func in called.items()}
    names |= {ast.unparse(one.func) for one in ast.walk(tree) if isinstance(one, ast.Call) and _is_dotted(one.func)}
    return [_text(one, known) for one in _factors(tree)], sorted(names)


def _is_name(node: ast.expr) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name)


def _is_dotted(node: ast.expr) -> bool:
    """Return whether an expression is a name with attributes, such as F.cross_entropy."""
    return isinstance(node, ast.Attribute) and (_is_name(node.value) or _is_dotted(node.value))


def _text(factor: tuple[str, ast.expr], known: Mapping[str, ast.expr]) -> str:
    sign, value = factor
    value = known.get(value.id, value) if isinstance(value, ast.Name) else value
    text = ast.unparse(value)
    return f"{sign}{f'({text})' if sign and isinstance(value, ast.BinOp) else text}"


def _factors(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    for one in ast.walk(tree):
        if isinstance(one, ast.AugAssign) and isinstance(one.op, ast.Div | ast.Mult):
            yield "1 / " if isinstance(one.op, ast.Div) else "", one.value
        elif isinstance(one, ast.BinOp) and isinstance(one.op, ast.Div):
            yield "1 / ", one.right
        elif isinstance(one, ast.BinOp) and isinstance(one.op, ast.Mult):
            yield "", one.left
            yield "", one.right
        elif isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) and one.func.attr in ("div", "mul"):
            yield from (("1 / " if one.func.attr == "div" else "", value) for value in one.args[:1])


def divides(values: Mapping[str, Any], micro: int, *, is_known: bool) -> bool | None:
    """Return whether a loop divides its loss by the number of micro-steps; None if its text does not show it.

    Args:
        values: the factors and their values on a rank, see `rank.verify.factors.factor_values`.
        micro: number of micro-steps.
        is_known: the loss calls only functions of torch and models.

    Example:
        >>> divides({"1 / 4": 0.25}, 4, is_known=True), divides({}, 4, is_known=True)
        (True, False)
        >>> divides({"1 / n[0]": None}, 4, is_known=True) is None
        True
    """
    for text, value in values.items():
        is_of_world = any(one in text for one in _OF_WORLD)
        if isinstance(value, int | float) and abs(value * micro - 1) < _CLOSE and not is_of_world:
            return True
    return False if is_known and None not in values.values() else None
