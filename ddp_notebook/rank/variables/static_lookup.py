"""Find the value of a path such as `model.layers[0].weight` without running code of the user.

Values are read from the dictionaries of namespaces, modules, classes and instances. No property, `__getattr__`,
`__getitem__`, `__dir__` or `__eq__` of the user is called. So no collective can begin, and objects that a cell
changes at the same time are safe: the dictionaries are copied in one step.
"""

from __future__ import annotations

import ast
import builtins
import sys
import types
from collections import UserDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import re

UNKNOWN = object()  # the value is not known, only its type
PARTS_OF_MODULES = ("_parameters", "_buffers", "_modules")
_MOST_ITEMS = 10_000  # larger dictionaries are not searched
_MOST_STEPS = 50
_FIELDS_OF_TENSOR = {"shape": torch.Size, "dtype": torch.dtype, "device": torch.device}
_TENSORS_OF_TENSOR = ("grad", "data", "T", "mT", "H", "mH", "real", "imag")
_RETURNS_TENSOR = re.compile(r"->\s*Tensor\s*$", re.MULTILINE)  # in the docstring of a function of torch
_HEAD_CHARS = 600  # the part of a docstring with the signature
_MODULES = (torch, torch.nn.functional, torch.linalg, torch.fft, torch.special)
BUILTIN = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
_MOST_WRAPPERS = 20
_mro = type.__dict__["__mro__"].__get__
_class_dict = type.__dict__["__dict__"].__get__
_class_name = type.__dict__["__name__"].__get__
_SLOTS_OF_DICT = (types.GetSetDescriptorType, types.MemberDescriptorType)


@dataclass(frozen=True, slots=True)
class Known:
    """A value, or only its type."""

    kind: type
    value: Any = UNKNOWN

    @classmethod
    def of(cls, value: Any) -> Known:
        return cls(type(value), value)

    @property
    def has_value(self) -> bool:
        return self.value is not UNKNOWN


def type_name(kind: type) -> str:
    """Return the name of a type, even if its metaclass defines another `__name__`."""
    return str(_class_name(kind))


def mro(kind: type) -> Sequence[type]:
    """Return the classes in which attributes of an instance are looked up."""
    return tuple(_mro(kind))


def inherits(kind: type, *bases: type) -> bool:
    """Return whether a type is one of the others or inherits from it. `issubclass` could call code of a metaclass."""
    return any(one is base for one in mro(kind) for base in bases)


def is_one_of(kind: type, kinds: Iterable[type]) -> bool:
    """Return whether a type is one of these. `in` would call `__eq__` or `__hash__` of a metaclass."""
    return any(kind is one for one in kinds)


def items(mapping: Any) -> dict[str, Any]:
    """Return the entries of a dictionary whose keys are plain strings, copied in one step. Empty for other types."""
    if type(mapping) is types.MappingProxyType:
        pairs = list(mapping.items())
    elif inherits(type(mapping), dict) and dict.__len__(mapping) <= _MOST_ITEMS:
        pairs = list(dict.items(mapping))
    else:
        return {}
    return {key: value for key, value in pairs if type(key) is str}


def own_attributes(kind: type) -> dict[str, Any]:
    """Return the attributes of a class without those of its bases, as they are stored."""
    return items(_class_dict(kind))


def class_attributes(kind: type) -> dict[str, Any]:
    """Return the attributes of a class and its bases, as they are stored: functions, properties, descriptors."""
    found: dict[str, Any] = {}
    for base in reversed(mro(kind)):
        found.update(own_attributes(base))
    return found


def class_attribute(kind: type, name: str) -> Any:
    """Return one attribute of a class or its bases, as it is stored; `UNKNOWN` if there is none."""
    for base in mro(kind):
        if name in (entries := own_attributes(base)):
            return entries[name]
    return UNKNOWN


def instance_attributes(value: Any) -> dict[str, Any]:
    """Return the attributes in the `__dict__` of an object; empty if its class replaces `__dict__`."""
    if inherits(type(value), type):
        return {}  # see `class_attributes`
    for base in mro(type(value)):
        if (slot := own_attributes(base).get("__dict__")) is not None:
            if not is_one_of(type(slot), _SLOTS_OF_DICT):
                return {}
            break
    else:
        return {}
    try:
        return items(object.__getattribute__(value, "__dict__"))
    except AttributeError:
        return {}


def module_parts(value: Any) -> dict[str, Any]:
    """Return the parameters, buffers and submodules of an `nn.Module`, which are not attributes of the instance."""
    if not inherits(type(value), torch.nn.Module):
        return {}
    own = instance_attributes(value)
    return {name: part for parts in PARTS_OF_MODULES for name, part in items(own.get(parts, {})).items()}


def attribute(of: Known, name: str) -> Known | None:
    """Return an attribute, or None if its value is not stored anywhere, as that of a property."""
    value = of.value
    if of.has_value:
        for entries in (instance_attributes(value), module_parts(value)):
            if name in entries:
                return Known.of(entries[name])
        if inherits(of.kind, type) and (stored := class_attribute(value, name)) is not UNKNOWN:
            return _plain(Known(type(stored), stored))
    if inherits(of.kind, torch.Tensor):
        if name in _FIELDS_OF_TENSOR:
            return Known(_FIELDS_OF_TENSOR[name])
        if name in _TENSORS_OF_TENSOR:
            return Known(torch.Tensor)
    stored = class_attribute(of.kind, name)
    if stored is UNKNOWN:
        return None
    if type(stored) is types.MemberDescriptorType and of.has_value:  # a slot
        try:
            return Known.of(types.MemberDescriptorType.__get__(stored, value, of.kind))
        except (AttributeError, TypeError):
            return None
    return _plain(Known.of(stored))


def stored_attribute(value: Any, name: str) -> Any:
    """Return an attribute that is stored in the instance or in a slot, such as `_spec` of a DTensor; None without."""
    found = attribute(Known.of(value), name)
    return None if found is None or not found.has_value else found.value


def _plain(stored: Known) -> Known | None:
    """Return the function inside a static or class method. None for descriptors, which would run code."""
    if is_one_of(stored.kind, (staticmethod, classmethod)):
        return Known.of(stored.value.__func__)
    if stored.kind is property or is_one_of(stored.kind, _SLOTS_OF_DICT) or "__get__" in class_attributes(stored.kind):
        is_function = is_one_of(
            stored.kind, (types.FunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
        )
        return stored if is_function else None
    return stored


def item(of: Known, key: int | str) -> Known | None:
    """Return an item of a list, tuple, dict or of a container of modules; None for other types."""
    value, kind = of.value, of.kind
    if not of.has_value:
        return None
    if type(key) is int and is_one_of(kind, (list, tuple, torch.Size)):
        try:
            return Known.of(value[key])
        except IndexError:
            return None
    if inherits(kind, torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict):
        parts = module_parts(value)
        name = str(key + len(parts)) if type(key) is int and key < 0 else str(key)
        return Known.of(parts[name]) if name in parts else None
    entries = dict_of(value)
    if entries is None:
        return None
    for one, part in entries:
        if type(one) is type(key) and one == key:
            return Known.of(part)
    return None


def dict_of(value: Any) -> list[tuple[Any, Any]] | None:
    """Return the items of a dict, also of one inside a `UserDict`; None for other values."""
    if inherits(type(value), UserDict):
        value = instance_attributes(value).get("data")
    if not inherits(type(value), dict) or dict.__len__(value) > _MOST_ITEMS:
        return None
    return list(dict.items(value))


class Lookup:
    """Finds values of paths.

    Args:
        namespace: variables of the rank.
        assigned: see `ListNames`.

    Example:
        >>> lookup = Lookup({"net": torch.nn.Sequential(torch.nn.Linear(2, 1))}, [["x", "call", "torch.ones"]])
        >>> lookup.find("net[0].weight").kind.__name__, lookup.find("x") is None
        ('Parameter', True)
        >>> Lookup({"torch": torch}, [["x", "call", "torch.ones"]]).find("x").kind.__name__
        'Tensor'
    """

    def __init__(self, namespace: Mapping[str, Any], assigned: Sequence[Sequence[str]] = ()) -> None:
        self.namespace = items(namespace)
        self.assigned = {name: (how, path) for name, how, path in assigned}

    def find(self, path: str) -> Known | None:
        """Return the value of a path, or None."""
        if (steps := _steps(path)) is None:
            return None
        root, *rest = steps
        found = self.variable(root)
        for is_item, key in rest:
            if found is None:
                return None
            found = item(found, key) if is_item else attribute(found, key)
        return found

    def variable(self, name: str) -> Known | None:
        """Return a variable: of the lines above the cursor, of the rank, or of `builtins`."""
        now = Known.of(self.namespace[name]) if name in self.namespace else None
        if (assignment := self.assigned.pop(name, None)) is not None:  # removed: `x = x.y` refers to an earlier `x`
            try:
                set_above = self._assigned(*assignment)
            finally:
                self.assigned[name] = assignment
            # The value of an earlier run has more to offer than its type alone.
            return set_above if set_above is not None and (now is None or now.kind is not set_above.kind) else now
        if now is None and name in (of_python := items(vars(builtins))):
            return Known.of(of_python[name])
        return now

    def _assigned(self, how: str, path: str) -> Known | None:
        if how == "call":
            return self._returned(path)
        if how == "value":
            return self.find(path)
        if how == "module":
            return None if (module := sys.modules.get(path)) is None else Known.of(module)
        if how == "export":
            package, _, name = path.rpartition(".")
            return export(package, name)
        return None

    def _returned(self, path: str) -> Known | None:
        """Return the type of a call's value: of a class, or of a function of torch that returns a tensor."""
        called = self.find(path)
        if called is None or not called.has_value:
            return None
        if inherits(called.kind, type):
            return Known(called.value)
        return Known(torch.Tensor) if _returns_tensor(called.value) else None


def called_function(value: Any) -> Any:
    """Return the function that a call of a value runs first; None if it cannot be called or is not known."""
    kind = type(value)
    if inherits(kind, type):
        init = class_attribute(value, "__init__")
        return init if is_one_of(type(init), (types.FunctionType, types.WrapperDescriptorType)) else None
    if kind is types.MethodType:
        value = value.__func__
    for _ in range(_MOST_WRAPPERS):
        inner = instance_attributes(value).get("__wrapped__")
        if type(value) is not types.FunctionType or type(inner) is not types.FunctionType:
            break
        value = inner
    return value if is_one_of(type(value), (types.FunctionType, *BUILTIN)) else None


def export(module: str, name: str) -> Known | None:
    """Return what `from module import name` would import, if it is loaded."""
    if (loaded := sys.modules.get(module)) is not None and name in (names := instance_attributes(loaded)):
        return Known.of(names[name])
    submodule = sys.modules.get(f"{module}.{name}")
    return None if submodule is None else Known.of(submodule)


def _returns_tensor(function: Any) -> bool:
    """Return whether a value is a function of torch, or a method of tensors, that returns one tensor."""
    if type(function) is types.MethodDescriptorType:
        is_of_torch = inherits(torch.Tensor, function.__objclass__)
    elif is_one_of(type(function), (types.BuiltinFunctionType, types.FunctionType)):
        name = function.__name__
        is_of_torch = any(instance_attributes(one).get(name) is function for one in _MODULES)
    else:
        return False
    if not is_of_torch:
        return False
    text = function.__doc__
    if type(text) is str and _RETURNS_TENSOR.search(text[:_HEAD_CHARS]):
        return True
    return type(function) is types.FunctionType and function.__annotations__.get("return") in (torch.Tensor, "Tensor")


def _steps(path: str) -> list[Any] | None:
    """Split a path into its first name, and pairs: whether it is an item, and the name or key. None: no such path."""
    try:
        node: ast.expr = ast.parse(path.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    steps: list[Any] = []
    while not isinstance(node, ast.Name):
        if len(steps) > _MOST_STEPS:
            return None
        if isinstance(node, ast.Attribute):
            steps.append((False, node.attr))
        elif isinstance(node, ast.Subscript) and (key := _key(node.slice)) is not None:
            steps.append((True, key))
        else:
            return None
        node = node.value
    return [node.id, *reversed(steps)]


def _key(node: ast.expr) -> int | str | None:
    try:
        key = ast.literal_eval(node)
    except (ValueError, TypeError):
        return None
    return key if type(key) in (int, str) else None
