"""Serialize numbers, text, tensors, arrays and containers of them without pickle.

A pickle lets the sender choose which functions the reader calls. In this format the sender can choose only among the
values below, and the reader checks every size. So data from a rank on a compromised host is safe to read.

The first part (see `buffers`) is JSON. `null`, `true`, `false`, integers, finite floats and short texts represent
themselves. Every other value is a list that starts with a tag:

    ["float", "nan"]            also "inf", "-inf"
    ["complex", re, im]         two floats
    ["int", "-1f"]              an integer above 64 bits, in hexadecimal digits
    ["str", part]               a long text in UTF-8
    ["bytes", part], ["bytearray", part]
    ["list", ...], ["tuple", ...], ["set", ...], ["frozenset", ...]
    ["dict", key, value, ...], ["OrderedDict", key, value, ...]
    ["array", part, "<f4", [2, 3]]                in C order
    ["scalar", part, "<f4"]                       a NumPy scalar
    ["tensor", part, "bfloat16", [2, 3], false]   in C order; the last element is requires_grad
    ["parameter", part, "float32", [2], true]
"""

from __future__ import annotations

import importlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import json, math, re
from ddp_notebook.wire.buffers import split

MOST_DEPTH = 100  # maximum nesting depth of containers
MOST_JSON_BYTES = 256 << 20
_LONG_TEXT = 1000  # characters; a longer text gets its own part
_BOTH_NEED = "use %ddp_pull without --safe, which sends a pickle"
# torch dtypes whose elements are whole bytes. Other dtypes, such as quantized ones, are not supported.
DTYPES = frozenset(
    {"bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"}
    | {"float16", "bfloat16", "float32", "float64", "complex64", "complex128"}
    | {"float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"}
)
_ARRAY_DTYPE = re.compile(r"[<>]([iu][248]|f[248]|c(8|16))|\|[biu]1")
_HEX = re.compile(r"-?[0-9a-f]+")


class NotSafeError(Exception):
    """The value cannot be serialized in this format. The message names the value and a remedy."""


# ---- writing


class TooLargeError(Exception):
    """The value exceeds the allowed number of bytes. The argument is the number of bytes so far."""


def write(name: str, value: Any, most_bytes: float = math.inf) -> list[list[Any]]:
    """Serialize a value as parts for `buffers.join`. Contiguous arrays and CPU tensors are not copied.

    Args:
        name: variable name, for error messages.
        value: value to write. Attributes set on a tensor or a dict are left out.
        most_bytes: maximum size in bytes.

    Raises:
        NotSafeError: a part of the value cannot be sent. The message names the part, its type and a remedy.
        TooLargeError: the value has more than `most_bytes` bytes.

    Example:
        >>> from ddp_notebook.wire.buffers import join
        >>> read(b"".join(join(write("x", {"lr": 0.1, 3: (None, b"raw")}))))
        {'lr': 0.1, 3: (None, b'raw')}
    """
    writer = _Writer(most_bytes)
    text = json.dumps(writer.node(value, name, 0), allow_nan=False, separators=(",", ":")).encode()
    if len(text) > MOST_JSON_BYTES:
        raise NotSafeError(
            f"{name} has too many single values ({len(text) / 1e6:.0f} MB of text); put its numbers into a tensor or "
            "an array"
        )
    return [[text], *writer.parts]


class _Writer:
    def __init__(self, most_bytes: float) -> None:
        self.parts: list[list[Any]] = []
        self._most_bytes = most_bytes
        self._numbers: dict[int, int] = {}  # id of a tensor or array -> number of its part
        self._above: set[int] = set()  # ids of the containers around the current value
        self._nbytes = self._json_bytes = 0

    def node(self, value: Any, where: str, depth: int) -> Any:
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is int:
            return value if -(1 << 63) <= value < 1 << 64 else ["int", f"{value:x}"]
        if kind is float:
            return value if math.isfinite(value) else ["float", repr(value)]
        if kind is complex:
            return ["complex", self.node(value.real, where, depth), self.node(value.imag, where, depth)]
        if kind is str:
            if len(value) <= _LONG_TEXT:
                return value
            self._count(len(value))
            return ["str", self._part(value.encode("utf-8", "surrogatepass"))]
        if kind is bytes or kind is bytearray:
            self._count(len(value))
            return [kind.__name__, self._part(value)]
        if kind in _CONTAINERS:
            return self._container(value, where, depth)
        return self._array(value, where)

    def _part(self, data: Any) -> int:
        self.parts.append([data])
        return len(self.parts)

    def _container(self, value: Any, where: str, depth: int) -> list[Any]:
        if id(value) in self._above:
            raise NotSafeError(f"{where} contains itself; send its contents under other names, or {_BOTH_NEED}")
        if depth >= MOST_DEPTH:
            raise NotSafeError(f"{where[:200]}... is nested more than {MOST_DEPTH} deep; {_BOTH_NEED}")
        self._above.add(id(value))
        node: list[Any] = [type(value).__name__]
        if isinstance(value, dict):
            for key, one in list(value.items()):
                shown = _shown(key)
                node.append(self.node(key, f"the key {shown} of {where}", depth + 1))
                node.append(self.node(one, f"{where}[{shown}]", depth + 1))
        else:
            for number, one in enumerate(list(value)):
                is_ordered = isinstance(value, list | tuple)
                node.append(self.node(one, f"{where}[{number}]" if is_ordered else f"an element of {where}", depth + 1))
        self._above.discard(id(value))
        self._json_bytes += 2 * len(node)
        if self._json_bytes > MOST_JSON_BYTES:  # shared elements may serialize to much more than their memory
            raise NotSafeError(f"{where} has too many single values; put its numbers into a tensor or an array")
        return node

    def _array(self, value: Any, where: str) -> list[Any]:
        numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            return self._tensor(torch, value, where)
        if numpy is not None and (type(value) is numpy.ndarray or isinstance(value, numpy.generic)):
            dtype = value.dtype
            if not _ARRAY_DTYPE.fullmatch(dtype.str):
                raise NotSafeError(
                    f"{where} is a NumPy {type(value).__name__} of dtype {dtype}; --safe sends numbers, so use "
                    f".tolist() or .astype(), or {_BOTH_NEED}"
                )
            if isinstance(value, numpy.generic):
                return ["scalar", self._part(value.tobytes()), dtype.str]

            def bytes_of_it() -> Any:
                return numpy.ascontiguousarray(value).reshape(-1).view(numpy.uint8)

            return ["array", self._memory(value, value.nbytes, bytes_of_it), dtype.str, list(value.shape)]
        raise NotSafeError(f"{where} is a {_name(type(value))}; {_remedy(value)}, or {_BOTH_NEED}")

    def _tensor(self, torch: Any, value: Any, where: str) -> list[Any]:
        dtype = str(value.dtype).removeprefix("torch.")
        is_parameter = type(value) is torch.nn.Parameter
        if not (is_parameter or type(value) is torch.Tensor):
            if hasattr(value, "full_tensor"):
                how = "send its local part, .to_local(), or .full_tensor(), which all ranks must call"
            else:
                how = "convert it to a plain tensor"
            raise NotSafeError(f"{where} is a {_name(type(value))}; {how}, or {_BOTH_NEED}")
        if value.layout is not torch.strided or value.is_quantized or value.is_nested:
            kind = "quantized" if value.is_quantized else "nested" if value.is_nested else str(value.layout)
            how = ".dequantize()" if value.is_quantized else ".unbind()" if value.is_nested else ".to_dense()"
            raise NotSafeError(f"{where} is a {kind} tensor; send {how}, or {_BOTH_NEED}")
        if value.is_meta:
            raise NotSafeError(f"{where} is a tensor on the meta device, which has no values")
        if dtype not in DTYPES:
            raise NotSafeError(f"{where} is a tensor of dtype {dtype}; convert it with .to(), or {_BOTH_NEED}")

        def memory() -> Any:
            plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
            return plain.reshape(-1).view(torch.uint8).numpy() if plain.numel() else b""

        tag = "parameter" if is_parameter else "tensor"
        return [tag, self._memory(value, value.nbytes, memory), dtype, list(value.shape), bool(value.requires_grad)]

    def _memory(self, value: Any, nbytes: int, make: Callable[[], Any]) -> int:
        """Return the part number of an array. An array that occurs several times is sent once."""
        if (number := self._numbers.get(id(value))) is None:
            self._count(nbytes)  # before `make`: an expanded tensor may be larger than all memory
            number = self._numbers[id(value)] = self._part(make())
        return number

    def _count(self, nbytes: int) -> None:
        self._nbytes += nbytes
        if self._nbytes > self._most_bytes:
            raise TooLargeError(self._nbytes)


def _remedy(value: Any) -> str:
    if hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        return "send dataclasses.asdict() of it"
    if isinstance(value, tuple):
        return "send tuple() of it"
    if isinstance(value, dict):
        return "send dict() of it"
    if isinstance(value, str | int | float | bytes | list | set | frozenset):
        base = next(kind for kind in (str, int, float, bytes, list, set, frozenset) if isinstance(value, kind))
        return f"send {base.__name__}() of it"
    if callable(getattr(value, "state_dict", None)):
        return "send its state_dict()"
    return "--safe sends numbers, text, tensors, arrays and containers of them"


def _name(kind: type) -> str:
    return kind.__name__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__name__}"


def _shown(key: Any) -> str:
    return repr(key)[:40] if isinstance(key, str | int | float | bytes | bool | None) else f"a {_name(type(key))}"


# ---- reading


def read(data: Any) -> Any:
    """Return the value that `write` serialized. The sender is not trusted.

    Arrays and tensors use the memory of `data`.

    Args:
        data: writable buffer.

    Raises:
        ValueError, TypeError, ...: the data is not in this format.
        ImportError: the data contains tensors and torch is not installed.
    """
    text, *parts = split(data)
    if len(text) > MOST_JSON_BYTES:
        raise ValueError(f"JSON must have at most {MOST_JSON_BYTES} bytes, got {len(text)}")
    return _Reader(parts).value(json.loads(bytes(text), parse_constant=_refuse), 0)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not allowed in the JSON")


class _Reader:
    def __init__(self, parts: list[memoryview]) -> None:
        self._parts = parts

    def value(self, node: Any, depth: int) -> Any:
        if not isinstance(node, list):
            if isinstance(node, dict):
                raise ValueError("a list was expected, not a JSON object")
            return node
        if depth > MOST_DEPTH:
            raise ValueError(f"nested more than {MOST_DEPTH} deep")
        tag, *rest = node
        if not isinstance(tag, str):
            raise ValueError("a list without a tag")
        if tag in _CONTAINERS_BY_NAME:
            inside = (self.value(one, depth + 1) for one in rest)
            if not tag.lower().endswith("dict"):
                return _CONTAINERS_BY_NAME[tag](inside)
            if len(rest) % 2:
                raise ValueError("a key without a value")
            return _CONTAINERS_BY_NAME[tag](_pairs(inside))
        if tag not in _LEAVES:
            raise ValueError(f"the tag {tag[:40]!r}")
        return _LEAVES[tag](self, *rest)

    def part(self, number: Any) -> memoryview:
        if type(number) is not int or not 0 < number <= len(self._parts):
            raise ValueError("the number of a part that does not exist")
        return self._parts[number - 1]

    def take_float(self, text: Any) -> float:
        if text not in ("nan", "inf", "-inf"):
            raise ValueError("a float that is not one of nan, inf and -inf")
        return float(text)

    def take_complex(self, real: Any, imaginary: Any) -> complex:
        numbers = [self.value(one, MOST_DEPTH) for one in (real, imaginary)]
        if any(type(one) is not float for one in numbers):
            raise ValueError("a complex number whose parts are not floats")
        return complex(*numbers)

    def take_int(self, digits: Any) -> int:
        if not isinstance(digits, str) or not _HEX.fullmatch(digits):
            raise ValueError("an integer must have hexadecimal digits")
        return int(digits, 16)

    def take_str(self, number: Any) -> str:
        return str(self.part(number), "utf-8", "surrogatepass")

    def take_bytes(self, number: Any) -> bytes:
        return bytes(self.part(number))

    def take_bytearray(self, number: Any) -> bytearray:
        return bytearray(self.part(number))

    def take_array(self, number: Any, dtype: Any, shape: Any) -> Any:
        import numpy

        if not isinstance(dtype, str) or not _ARRAY_DTYPE.fullmatch(dtype):
            raise ValueError("an array of an unknown dtype")
        part, kind = self.part(number), numpy.dtype(dtype)
        _check_size(part, shape, kind.itemsize)
        if kind.kind == "b":
            _check_booleans(part)
        flat = numpy.frombuffer(part, kind) if len(part) else numpy.empty(0, kind)
        return flat.reshape(shape)

    def take_scalar(self, number: Any, dtype: Any) -> Any:
        return self.take_array(number, dtype, [])[()]

    def take_tensor(self, number: Any, dtype: Any, shape: Any, requires_grad: Any) -> Any:
        torch = importlib.import_module("torch")
        if not isinstance(dtype, str) or dtype not in DTYPES or not hasattr(torch, dtype):
            raise ValueError("a tensor of an unknown dtype")
        if type(requires_grad) is not bool:
            raise ValueError("requires_grad of a tensor must be a boolean")
        part, kind = self.part(number), getattr(torch, dtype)
        _check_size(part, shape, kind.itemsize)
        if dtype == "bool":
            _check_booleans(part)
        flat = torch.frombuffer(part, dtype=kind) if len(part) else torch.empty(0, dtype=kind)
        return flat.reshape(shape).requires_grad_(requires_grad)

    def take_parameter(self, number: Any, dtype: Any, shape: Any, requires_grad: Any) -> Any:
        values = self.take_tensor(number, dtype, shape, False)
        return importlib.import_module("torch").nn.Parameter(values, requires_grad=requires_grad)


def _pairs(values: Iterator[Any]) -> Iterator[tuple[Any, Any]]:
    return zip(values, values, strict=True)


def _check_size(part: memoryview, shape: Any, itemsize: int) -> None:
    if not isinstance(shape, list) or len(shape) > 64 or any(type(n) is not int or not 0 <= n < 1 << 62 for n in shape):
        raise ValueError("a shape that is not a list of sizes")
    if len(part) != math.prod(shape) * itemsize:
        raise ValueError(f"{math.prod(shape)} elements of {itemsize} bytes do not match {len(part)} bytes of data")


def _check_booleans(part: memoryview) -> None:
    """Raise ValueError for bytes other than 0 and 1, which are undefined behaviour in C++."""
    import numpy

    if len(part) and numpy.frombuffer(part, numpy.uint8).max() > 1:
        raise ValueError("a boolean that is neither 0 nor 1")


_CONTAINERS: tuple[type, ...] = (list, tuple, set, frozenset, dict, OrderedDict)
_CONTAINERS_BY_NAME: dict[str, Callable[[Any], Any]] = {kind.__name__: kind for kind in _CONTAINERS}
_LEAVES: dict[str, Callable[..., Any]] = {
    "float": _Reader.take_float,
    "complex": _Reader.take_complex,
    "int": _Reader.take_int,
    "str": _Reader.take_str,
    "bytes": _Reader.take_bytes,
    "bytearray": _Reader.take_bytearray,
    "array": _Reader.take_array,
    "scalar": _Reader.take_scalar,
    "tensor": _Reader.take_tensor,
    "parameter": _Reader.take_parameter,
}
