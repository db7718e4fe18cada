"""Serialize a rank's variables for the notebook, and describe them in one line."""

from __future__ import annotations

import reprlib
from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ddp_notebook.rank.cell.exceptions import words
from ddp_notebook.records.units import size
from ddp_notebook.stdlib import contextlib, math, re
from ddp_notebook.wire import bulk, safe

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # differs between ranks and has no meaning in the notebook


class CannotSendError(Exception):
    """A variable cannot be sent. The message names it and the reason."""


def read(
    namespace: Mapping[str, Any], name: str, *, force: bool = False, is_safe: bool = False
) -> tuple[list[list[Any]], str]:
    """Serialize a variable as parts for `buffers.join`, and describe it. GPU tensors are moved to the CPU.

    Args:
        namespace: all variables.
        name: name of the variable.
        force: send it even if it is large.
        is_safe: use the format of `wire.safe` instead of a pickle.

    Raises:
        CannotSendError: the variable does not exist, is too large, or cannot be sent in this format.
    """
    if name not in namespace:
        raise CannotSendError(f"undefined variable {name!r}")
    value = namespace[name]
    kind = type(value).__name__
    most_bytes = math.inf if force else bulk.MOST_BYTES
    try:
        if is_safe:
            return safe.write(name, value, most_bytes), describe(value)
        nbytes = bulk.weigh(value)
        if nbytes > most_bytes:
            raise safe.TooLargeError(nbytes)
        return bulk.pickled(value), describe(value)
    except safe.TooLargeError as error:
        raise CannotSendError(
            f"{name!r} ({kind}) has {size(error.args[0])}, more than {size(bulk.MOST_BYTES)}: "
            "send it with --force (force=True)"
        ) from None
    except safe.NotSafeError as error:
        raise CannotSendError(f"{name!r} ({kind}) cannot be sent safely: {error}") from None
    except Exception as error:
        raise CannotSendError(f"{name!r} ({kind}) cannot be pickled: {words(error)}") from error


def describe(value: Any) -> str:
    """Describe a value in one line: shape, dtype, device and range of a tensor, otherwise its truncated repr.

    Example:
        >>> describe(torch.arange(6.0).reshape(2, 3))
        'tensor float32 (2, 3) on cpu: min 0 mean 2.5 max 5'
    """
    if isinstance(value, torch.Tensor | np.ndarray):
        with contextlib.suppress(Exception):  # device or dtype without these operations: only the name
            return f"{_name(value)}: {_range(value)}"
        return _name(value)
    try:
        text = _Short().repr(value)
    except ValueError:  # an integer with more digits than Python converts to text
        text = f"<{type(value).__name__} object>"
    return _ADDRESS.sub("", " ".join(text.split()))


def _name(value: torch.Tensor | np.ndarray) -> str:
    shape = tuple(value.shape)
    if isinstance(value, np.ndarray):
        return f"array {value.dtype} {shape}"
    kind = type(value).__name__
    return f"{kind[:1].lower()}{kind[1:]} {str(value.dtype).removeprefix('torch.')} {shape} on {value.device}"


def _range(value: torch.Tensor | np.ndarray) -> str:
    """Return minimum, mean and maximum, and the number of NaNs."""
    if isinstance(value, np.ndarray):
        value = torch.tensor(value)  # a copy, because torch warns about read-only arrays
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        raise TypeError("an operation of a distributed tensor would wait for other ranks")
    x = value.detach()
    if x.numel() == 0:
        return "empty"
    if x.numel() == 1:
        return _number(x)
    if x.dtype in (torch.bool, torch.uint16, torch.uint32, torch.uint64) or x.element_size() == 1:
        x = x.float()  # torch cannot reduce these dtypes, including 8-bit floats
    low, high = x.aminmax()
    note = ""
    if low.isnan():
        is_nan = x.isnan()
        count = int(is_nan.sum())
        if count == x.numel():
            return f"all {count} NaN"
        x, note = x[~is_nan], f", {count} NaN"
        low, high = x.aminmax()
    if x.is_floating_point():  # float64 would take 30 times as long, and is not needed for six digits
        mean = x.mean(dtype=torch.float32 if x.element_size() < 4 else None)
    else:
        mean = x.mean(dtype=torch.float64)
    return f"min {_number(low)} mean {_number(mean)} max {_number(high)}{note}"


def _number(x: torch.Tensor) -> str:
    number = x.item()
    return f"{number:g}" if isinstance(number, float) else str(number)


class _Short(reprlib.Repr):
    """Short texts of nested values. `reprlib` calls `repr_X` for a type named X."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 80

    def repr_Tensor(self, x: Any, _: int) -> str:
        return _name(x) if isinstance(x, torch.Tensor) else self.repr_instance(x, 0)

    repr_Parameter = repr_Tensor

    def repr_bytes(self, x: Any, _: int) -> str:
        """Return the repr of the first bytes. `reprlib` would convert all bytes before it truncates the text."""
        if not isinstance(x, bytes | bytearray):  # a type with this name
            return self.repr_instance(x, 0)
        text = repr(x[: self.maxstring])
        return text if len(x) <= self.maxstring and len(text) <= self.maxstring else f"{text[: self.maxstring - 3]}..."

    repr_bytearray = repr_bytes

    def repr_ndarray(self, x: Any, _: int) -> str:
        return _name(x) if isinstance(x, np.ndarray) else self.repr_instance(x, 0)


_MOST_CHARS = 900
_MOST_SHOWN = 32  # maximum number of shown tensor elements
_MOST_LOOKED_AT = 1_000_000  # maximum number of checked values in containers
_PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray, torch.Size, torch.dtype, torch.device)
_LISTS = (list, tuple, set, frozenset, deque)
_DICTS = (dict, OrderedDict, defaultdict)


def peek(expression: str, namespace: Mapping[str, Any]) -> str:
    """Evaluate an expression, and return its value as text of at most 900 characters.

    Args:
        expression: Python expression.
        namespace: its variables.

    Raises:
        Exception: any error of the expression.

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
    """Return the type that can be copied only after the end of its program; "" if there is none.

    Copying numbers, text, plain tensors, arrays and containers of them runs no user code and no collective.

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
