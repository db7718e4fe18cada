"""A row per variable: type, shape, bytes, and a digest of the contents.

Values are found as in `static_lookup`, without running code of the user. So a rank can also answer while a cell runs.
"""

from __future__ import annotations

import fnmatch
import sys
import types
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ddp_notebook.rank.variables.static_lookup import (
    class_attribute,
    dict_of,
    inherits,
    instance_attributes,
    is_one_of,
    items,
    mro,
    own_attributes,
    stored_attribute,
    type_name,
)
from ddp_notebook.rank.whos.digests import Digests, digest
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import itertools

_CODE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, type)
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_SIZED = (bool, int, float, complex, str, bytes, bytearray, type(None), list, tuple, dict, set, frozenset, range)
_PLAIN_VALUES = (
    *(bool, int, float, complex, str, bytes, bytearray, type(None), range, slice, torch.dtype, torch.Size),
)
_CONTAINERS = (list, tuple, dict, set, frozenset)
_DISPATCH = torch.Tensor.__dict__.get("__torch_dispatch__", class_attribute(torch.Tensor, "__torch_dispatch__"))
# Attributes of every module: parameters, buffers and parts are read by name, hooks are code. The last one holds weak
# references of an RNN to its own parameters.
_OF_EVERY_MODULE = {*torch.nn.Module().__dict__, "_flat_weight_refs"}
_OF_EVERY_OPTIMIZER = ("defaults", "param_groups", "state", "step")  # schedulers replace `step`
_WRAPPERS = ("torch.nn.parallel.", "torch.distributed.", "torch._dynamo.")  # have no state of the user
_MOST_PARTS = 20_000  # values that are visited for one variable
_DEEPEST = 6
Row = dict[str, Any]


@dataclass
class _Found:
    """Everything that belongs to one variable."""

    tensors: int = 0
    nbytes: int = 0
    dtypes: dict[str, None] = field(default_factory=dict)
    devices: dict[str, None] = field(default_factory=dict)
    digests: list[str] = field(default_factory=list)
    requires_grad: list[bool] = field(default_factory=list)  # of each tensor
    is_complete: bool = True  # all contents were read
    is_in_module: bool = False  # only tensors and arrays count as bytes
    is_sharded: bool = False
    visited: int = 0


class Rows:
    """Lists the variables of a rank.

    Args:
        digests: reads contents; None: shapes and bytes only.
    """

    def __init__(self, digests: Digests | None) -> None:
        self._digests = digests
        self._storages: dict[int, tuple[int, str]] = {}  # bytes and device of each storage, by its identity
        self._gradients: set[int] = set()  # storages of gradients
        self._counted: set[int] = set()  # objects of the present variable whose bytes were counted
        self._around: set[int] = set()  # containers around the present part

    def of(self, namespace: Mapping[str, Any], pattern: str, hidden: Container[str]) -> dict[str, Any]:
        """Return "rows" by name, "code" (names of functions, classes and modules that are not listed) and "memory".

        Args:
            namespace: variables of the rank.
            pattern: see `ListVariables`.
            hidden: names of IPython and of this package.

        Example:
            >>> found = Rows(None).of({"x": torch.ones(2, 3), "y": [1, 2]}, "", ())
            >>> found["rows"]["x"]["shape"], found["rows"]["x"]["nbytes"], found["rows"]["y"]["shape"]
            ('(2, 3)', 24, '2 items')
        """
        rows, code = {}, []
        for name, value in list(namespace.items()):
            if (
                type(name) is not str
                or name in hidden
                or not fnmatch.fnmatchcase(name, pattern or "*")
                or (not pattern and name[0] == "_")
            ):
                continue
            if not pattern and inherits(type(value), *_CODE):
                code.append(name)
                continue
            try:
                rows[name] = self._row(value)
            except Exception as error:  # an object of a library, in an unusual state
                rows[name] = {"type": type_name(type(value)), "unread": type_name(type(error))}
        return {"rows": rows, "code": sorted(code), "memory": self._memory()}

    def _row(self, value: Any) -> Row:
        self._counted, self._around = set(), set()
        if self._digests is not None:
            self._digests.has_sampled = False
        found = _Found()
        self._visit(value, found, 0)
        row: Row = {
            "type": type_name(type(value)),
            "shape": _shape(value, found),
            "dtype": ", ".join(found.dtypes),
            "device": ", ".join(found.devices),
            "nbytes": found.nbytes,
        }
        if any(found.requires_grad):
            row["requires_grad"] = digest(bytes(found.requires_grad))
        if whole := self._larger_storage(value):
            row["of_nbytes"] = whole
        if found.is_sharded:
            row["sharded"] = True
        if self._digests is not None:
            # Without complete contents, equal digests would prove nothing, but other ones still show a difference.
            row["digest"] = digest(" ".join(found.digests).encode())
            row["complete"] = found.is_complete
            row["sampled"] = self._digests.has_sampled
        return row

    # ---- parts of a value

    def _visit(self, value: Any, found: _Found, depth: int) -> None:
        kind = type(value)
        found.visited += 1
        if found.visited > _MOST_PARTS or depth > _DEEPEST:
            found.is_complete = False
        elif inherits(kind, torch.Tensor):
            self._tensor(value, found)
        elif kind is np.ndarray:
            self._count(value, value.nbytes, found)
            found.dtypes[str(value.dtype)] = None
            self._add(found, f"{value.dtype} {value.shape}", lambda digests: digests.of_array(value))
        elif inherits(kind, torch.nn.Module):
            self._module(value, found, "", depth)
        elif inherits(kind, torch.optim.Optimizer):
            self._optimizer(value, found)
        else:
            self._other(value, found, depth)

    def _add(self, found: _Found, head: str, read: Any) -> None:
        """Add the form of a part, and the digest of its contents if they are read."""
        found.digests.append(head)
        if self._digests is not None:
            if one := read(self._digests):
                found.digests.append(one)
            else:
                found.is_complete = False

    def _tensor(self, x: Any, found: _Found, name: str = "") -> None:
        kind = type(x)
        found.tensors += id(x) not in self._counted
        local = x
        if type_name(kind) == "DTensor" and (of_rank := stored_attribute(x, "_local_tensor")) is not None:
            local = of_rank
            placements = getattr(stored_attribute(x, "_spec"), "placements", ())
            found.is_sharded |= any(type_name(type(one)) != "Replicate" for one in placements)
        elif not is_one_of(kind, _PLAIN_TENSORS) and class_attribute(kind, "__torch_dispatch__") is not _DISPATCH:
            found.is_complete = False  # its methods could run any code
            found.digests.append(type_name(kind))
            return
        with torch._C.DisableTorchFunctionSubclass():
            if torch.nn.parameter.is_lazy(x):
                found.digests.append("uninitialized")
                found.is_complete = False
                return
            shape = tuple(x.shape)
            found.dtypes[str(x.dtype).removeprefix("torch.")] = None
            found.devices[str(local.device)] = None
            self._count(x, _bytes_of(local), found)
            self._store(local)
            found.requires_grad.append(x.requires_grad)
            if x.is_leaf and (gradient := x.grad) is not None:
                of_rank = stored_attribute(gradient, "_local_tensor")
                self._store(gradient if of_rank is None else of_rank, is_gradient=True)
            self._add(found, f"{name} {x.dtype} {shape}", lambda digests: digests.of_tensor(local))

    def _module(self, module: Any, found: _Found, prefix: str, depth: int) -> None:
        """Visit the state of a module without its methods, which may be overridden."""
        if id(module) in self._around:
            return
        self._around.add(id(module))
        own = instance_attributes(module)
        for name in ("_parameters", "_buffers"):
            for key, tensor in self._entries(own.get(name), found).items():
                if tensor is not None:
                    self._tensor(tensor, found, f"{prefix}{key}")
        found.digests.append(f"training={own.get('training')}")
        for key, part in self._entries(own.get("_modules"), found).items():
            if part is not None:
                self._module(part, found, f"{prefix}{key}.", depth)
        self._attributes(type(module), own, found, depth)
        self._around.discard(id(module))

    def _attributes(self, kind: type, own: Mapping[str, Any], found: _Found, depth: int) -> None:
        """Visit the other attributes of a module, such as a list of tensors."""
        if _is_wrapper(kind):
            return
        if _keeps_state_elsewhere(kind):
            found.is_complete = False
        was_in_module, found.is_in_module = found.is_in_module, True
        for key in sorted(own.keys() - _OF_EVERY_MODULE):
            found.digests.append(key)
            part = own[key]
            if is_one_of(type(part), _PLAIN_VALUES):  # not counted as visited: large models have many options
                self._other(part, found, depth)
            elif name := _name_in_torch(part):
                found.digests.append(name)
            else:
                self._visit(part, found, depth + 1)
        found.is_in_module = was_in_module

    def _entries(self, mapping: Any, found: _Found) -> dict[str, Any]:
        """Return the entries of a dictionary of a module; {} if it is too large to be read."""
        entries = items(mapping)
        if not entries and mapping:
            found.is_complete = False
        return entries

    def _optimizer(self, optimizer: Any, found: _Found) -> None:
        """Visit the state and the options of an optimizer. Its parameters belong to models."""
        own = instance_attributes(optimizer)
        groups, state = own.get("param_groups") or [], own.get("state")
        parameters: dict[int, None] = {}
        for group in groups:
            for parameter in group["params"]:
                parameters[id(parameter)] = None
            for key, option in items(group).items():
                if key not in ("params", "param_names"):
                    self._visit(option, found, _DEEPEST - 2)
        order = {one: number for number, one in enumerate(parameters)}
        if (entries := dict_of(state)) is None:  # too large
            found.is_complete = False
        states = {order.get(id(parameter), -1): values for parameter, values in entries or []}
        for number in sorted(states):
            for key, value in items(states[number]).items():
                found.digests.append(f"{number}.{key}")
                self._visit(value, found, _DEEPEST - 1)
        for key in sorted(own):
            if key not in _OF_EVERY_OPTIMIZER and not key.startswith("_") and not _is_wrapper(type(optimizer)):
                found.digests.append(key)
                self._visit(own[key], found, _DEEPEST - 2)
        found.visited = len(parameters)  # for `_shape`

    def _other(self, value: Any, found: _Found, depth: int) -> None:
        kind = type(value)
        if is_one_of(kind, _SIZED) and not found.is_in_module:
            self._count(value, sys.getsizeof(value), found)
        if id(value) in self._around:
            found.digests.append("around it")
            return
        if is_one_of(kind, _PLAIN_VALUES):
            self._add(found, type_name(kind), lambda digests: digests.of_plain(value))
            return
        parts = _parts_of(value)
        if parts is None:
            found.digests.append(type_name(kind))
            found.is_complete = found.is_complete and is_one_of(kind, (torch.device,))
            return
        if not inherits(kind, *_CONTAINERS) and _keeps_state_elsewhere(kind):
            found.is_complete = False
        self._around.add(id(value))
        found.digests.append(f"{type_name(kind)} {len(value) if is_one_of(kind, _SIZED) else len(parts)}")
        for key, part in parts:
            if found.visited > _MOST_PARTS:
                found.is_complete = False
                break
            found.digests.append(repr(key) if _is_plain(key) else type_name(type(key)))
            self._visit(part, found, depth + 1)
        self._around.discard(id(value))

    def _count(self, value: Any, nbytes: int, found: _Found) -> None:
        """Add the bytes of an object, once for each variable."""
        if id(value) not in self._counted:
            self._counted.add(id(value))
            found.nbytes += nbytes

    # ---- memory

    def _store(self, x: torch.Tensor, *, is_gradient: bool = False) -> None:
        if x.layout is not torch.strided or x.device.type == "meta":
            return
        storage = x.untyped_storage()
        self._storages[storage._cdata] = storage.nbytes(), str(x.device)
        if is_gradient:
            self._gradients.add(storage._cdata)

    def _larger_storage(self, value: Any) -> int:
        """Return the bytes of a tensor's storage if it is larger than the tensor, as for a slice; else 0."""
        if not is_one_of(type(value), _PLAIN_TENSORS) or value.layout is not torch.strided:
            return 0
        whole = value.untyped_storage().nbytes()
        return whole if whole > _bytes_of(value) else 0

    def _memory(self) -> dict[str, int]:
        """Return bytes: "variables" and "gradients", each storage once, and "other", torch's memory on the GPU that no
        listed variable holds."""
        total = sum(nbytes for key, (nbytes, _) in self._storages.items() if key not in self._gradients)
        gradients = sum(self._storages[key][0] for key in self._gradients)
        found = {"variables": total, "gradients": gradients}
        if torch.cuda.is_initialized():
            listed = sum(nbytes for nbytes, device in self._storages.values() if device.startswith("cuda"))
            found["other"] = max(0, torch.cuda.memory_allocated() - listed)
            found["cached"] = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return found


def _bytes_of(x: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements. Those of an expanded tensor share their memory."""
    nbytes = x.numel() * x.element_size()
    return min(nbytes, x.untyped_storage().nbytes()) if x.layout is torch.strided else nbytes


def _parts_of(value: Any) -> list[tuple[Any, Any]] | None:
    """Return the parts of a container or object with their keys. None if they are unknown or too many."""
    kind, own = type(value), instance_attributes(value)
    attributes = sorted(own.items())
    if inherits(kind, list, tuple):
        values = list.__iter__(value) if inherits(kind, list) else tuple.__iter__(value)
        return [*(("", one) for one in itertools.islice(values, _MOST_PARTS + 1)), *attributes]
    if is_one_of(kind, (set, frozenset)):
        is_read = len(value) <= _MOST_PARTS and all(map(_is_plain, value))
        return [("", one) for one in sorted(value, key=repr)] if is_read else None
    if (entries := dict_of(value)) is not None:
        if kind is dict and all(_is_plain(key) for key, _ in entries):
            entries.sort(key=lambda entry: repr(entry[0]))  # equal dicts may have another order
        return [*entries, *((name, part) for name, part in attributes if name != "data" or inherits(kind, dict))]
    return None if inherits(kind, dict) else attributes or None


class _Plain:
    """Has no state but its attributes."""


_basic_size = type.__dict__["__basicsize__"].__get__


def _keeps_state_elsewhere(kind: type) -> bool:
    """Return whether objects of a class keep state in slots or in C, as `random.Random` does, and not in attributes."""
    has_slots = any(
        type(one) is types.MemberDescriptorType for base in mro(kind) for one in own_attributes(base).values()
    )
    return has_slots or _basic_size(kind) > _basic_size(_Plain)


def _is_wrapper(kind: type) -> bool:
    """Return whether a class of torch wraps a model or optimizer and has no state of the user, such as DDP."""
    where = class_attribute(kind, "__module__")
    return type(where) is str and f"{where}.".startswith(_WRAPPERS)


def _name_in_torch(value: Any) -> str:
    """Return the full name of a function of torch, such as an activation; "" for other values."""
    if not is_one_of(type(value), (types.FunctionType, types.BuiltinFunctionType)):
        return ""
    where, name = value.__module__, value.__qualname__
    is_of_torch = type(where) is str and f"{where}.".startswith("torch.")
    return f"{where}.{name}" if is_of_torch and "<" not in name else ""


def _is_plain(value: Any) -> bool:
    return is_one_of(type(value), (bool, int, float, complex, str, bytes, type(None)))


def _shape(value: Any, found: _Found) -> str:
    """Return the shape of a tensor, or the number of parts."""
    kind = type(value)
    if inherits(kind, torch.Tensor):
        if found.digests == [type_name(kind)] or found.digests == ["uninitialized"]:
            return ""
        with torch._C.DisableTorchFunctionSubclass():
            return str(tuple(value.shape))
    if kind is np.ndarray:
        return str(value.shape)
    if inherits(kind, torch.nn.Module):
        return _count(found.tensors, "tensor")
    if inherits(kind, torch.optim.Optimizer):
        return _count(found.visited, "parameter")
    if is_one_of(kind, (list, tuple, set, frozenset)):
        return _count(len(value), "item")
    if (entries := dict_of(value)) is not None:
        return _count(len(entries), "item")
    return _count(len(value), "character") if kind is str else ""


def _count(number: int, unit: str) -> str:
    return f"{number:,} {unit}{'s' * (number != 1)}"
