"""The value of an expression in words, and which values can be copied while the program that changes them runs."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ddp_notebook.rank.variables.values import describe

_MOST_CHARS = 900
_MOST_SHOWN = 32  # elements of a tensor
_MOST_LOOKED_AT = 1_000_000  # values in containers
_PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray, torch.Size, torch.dtype, torch.device)
_LISTS = (list, tuple, set, frozenset, deque)
_DICTS = (dict, OrderedDict, defaultdict)


def peek(expression: str, namespace: Mapping[str, Any]) -> str:
    """Evaluate an expression, and return its value as text of at most 900 characters.

    Args:
        expression: of Python.
        namespace: its variables.

    Raises:
        Exception: whatever the expression raises.

    Example:
        >>> peek("history[-2:]", {"history": [0.5, 0.25, 0.125]})
        '[0.25, 0.125]'
    """
    value = eval(compile(expression.strip(), "<peek>", "eval"), {**namespace})
    if isinstance(value, torch.Tensor | np.ndarray) and _numel(value) > _MOST_SHOWN:
        return describe(value)
    text = repr(value)
    if len(text) > _MOST_CHARS:
        text = f"{text[:_MOST_CHARS]}... ({len(text):,} characters)"
    return text


def _numel(value: torch.Tensor | np.ndarray) -> int:
    return value.numel() if isinstance(value, torch.Tensor) else value.size


def unsafe(value: Any) -> str:
    """Return the type because of which a value can be copied only when its program has ended; "" if there is none.

    Numbers, text, plain tensors, arrays and containers of them run none of the user's code while they are copied, and
    no collective.

    Example:
        >>> unsafe({"loss": [0.5, torch.ones(2)]}), unsafe([torch.nn.Linear(2, 2)])
        ('', 'Linear')
    """
    left, looked_at = [value], 0
    while left:
        one = left.pop()
        looked_at += 1
        kind = type(one)
        if looked_at > _MOST_LOOKED_AT:
            return f"{type(value).__name__} of more than {_MOST_LOOKED_AT:,} values"
        if kind in _PLAIN or kind in (torch.Tensor, torch.nn.Parameter):
            continue
        if isinstance(one, np.generic) or (kind is np.ndarray and one.dtype.kind != "O"):
            continue
        if kind in _LISTS:
            left.extend(one)
        elif kind in _DICTS and (kind is not defaultdict or one.default_factory in (None, int, float, list, dict, set)):
            left.extend(one)
            left.extend(one.values())
        else:
            return kind.__name__
    return ""
