"""Evaluate the factors of a loss, such as a division by the number of micro-steps, without effects."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Mapping, Sequence
from types import BuiltinFunctionType, ModuleType
from typing import Any

import torch


def factor_values(namespace: Mapping[str, Any], factors: Sequence[str]) -> dict[str, Any]:
    """Return the values of factors: a number, "tensor" for a tensor or the result of a model, None if it is not known.

    Only names, attributes, `len()` and arithmetic are evaluated, because other calls may have effects.

    Example:
        >>> factor_values({"n": 4, "x": torch.ones(3)}, ["1 / n", "1 / len(x)", "x", "1 / next(n)", "1 / m"])
        {'1 / n': 0.25, '1 / len(x)': 0.3333333333333333, 'x': 'tensor', '1 / next(n)': None, '1 / m': None}
    """
    return {one: _value(namespace, one) for one in factors}


def _value(namespace: Mapping[str, Any], factor: str) -> Any:
    tree = ast.parse(factor, mode="eval")
    calls = [ast.unparse(one.func) for one in ast.walk(tree) if isinstance(one, ast.Call)]
    if set(calls) - {"len"}:
        return "tensor" if are_known(namespace, calls) and "next" not in calls else None
    if any(isinstance(one, ast.NamedExpr | ast.Await | ast.Yield) for one in ast.walk(tree)):
        return None
    try:
        value = eval(compile(tree, "<factor>", "eval"), {**namespace})
    except Exception:  # such as a local name of a function
        return None
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.requires_grad:
        value = value.item()
    return value if isinstance(value, int | float) else "tensor" if isinstance(value, torch.Tensor) else None


def are_known(namespace: Mapping[str, Any], called: Sequence[str]) -> bool:
    """Return whether called names are functions of torch, methods of tensors, or modules with parameters.

    A function or loss class of the user may divide its result.

    Example:
        >>> are_known({"F": torch.nn.functional, "net": torch.nn.Linear(1, 1)}, ["F.mse_loss", "net", "len"])
        True
        >>> are_known({"loss": lambda x: x / 4}, ["loss"])
        False
    """
    return all(_is_known(namespace, name) for name in called)


def _is_known(namespace: Mapping[str, Any], name: str) -> bool:
    first, *rest = name.split(".")
    if first not in namespace:
        return bool(rest) or hasattr(builtins, first)  # a method of a tensor of the step, or a function of Python
    value = namespace[first]
    for part in rest:
        value = getattr(value, part, None)
    if isinstance(value, torch.nn.Module):
        return type(value).__module__.startswith("torch") or any(True for _ in value.parameters())
    if isinstance(value, BuiltinFunctionType):  # such as torch.exp and x.mean, and not numbers.pop
        return isinstance(namespace[first], ModuleType | torch.Tensor)
    return str(getattr(value, "__module__", "")).startswith("torch")
