"""Names that may follow at the cursor, each with its type."""

from __future__ import annotations

import builtins
import dis
import keyword
import pkgutil
import sys
import types
from collections.abc import Container, Mapping, Sequence
from typing import Any

from ddp_notebook.rank.variables.static_lookup import (
    Known,
    Lookup,
    called_function,
    class_attributes,
    dict_of,
    inherits,
    instance_attributes,
    is_one_of,
    items,
    module_parts,
    mro,
    own_attributes,
    type_name,
)
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401

MOST_NAMES = 5000
_FUNCTIONS = (
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.MethodDescriptorType),
    *(types.WrapperDescriptorType, types.ClassMethodDescriptorType, types.MethodWrapperType, staticmethod, classmethod),
)
_PROPERTIES = (property, types.GetSetDescriptorType, types.MemberDescriptorType)
Names = list[list[str]]


def names_at(
    kind: str,
    path: str,
    namespace: Mapping[str, Any],
    hidden: Container[str] = (),
    assigned: Sequence[Sequence[str]] = (),
) -> Names | None:
    """Return the names that may follow at the cursor, each with its type. None: the value of the path is not known.

    Args:
        kind, path, assigned: see `ListNames`.
        namespace: variables of the rank.
        hidden: names that IPython has set.

    Example:
        >>> names_at("keys", "config", {"config": {"lr": 0.1, 3: None}})
        [["'lr'", 'float'], ['3', 'NoneType']]
    """
    if kind == "modules":
        return _modules(path)
    lookup = Lookup(namespace, assigned)
    found: dict[str, str] | None
    if kind == "variables":
        found = _parameters(lookup, path) | _variables(lookup, hidden)
    elif kind == "exports":
        module = sys.modules.get(path)
        found = None if module is None else _types(instance_attributes(module))
        if found is not None:
            found |= dict.fromkeys((name for name, _ in _modules(path)), "module")
    else:
        value = lookup.find(path)
        if value is None:
            return None
        found = _keys(value) if kind == "keys" else attributes(value)
    return None if found is None else [[name, type_] for name, type_ in found.items()][:MOST_NAMES]


def attributes(of: Known) -> dict[str, str]:
    """Return the names of the attributes of a value, each with its type.

    Example:
        >>> attributes(Known.of([]))["append"]
        'function'
    """
    found = _annotated(of.kind) | _types(class_attributes(of.kind))
    if of.has_value:
        if inherits(of.kind, type):
            return _types(class_attributes(of.value))
        if inherits(of.kind, types.ModuleType):
            found = {}
        found |= _types(instance_attributes(of.value)) | _types(module_parts(of.value))
    return found


def _annotated(kind: type) -> dict[str, str]:
    """Return the attributes that a class declares by annotations, as modules of torch do for those of `__init__`."""
    found: dict[str, str] = {}
    for base in reversed(mro(kind)):
        stored = own_attributes(base)
        for name, type_ in items(stored.get("__annotations__")).items():
            text = type_name(type_) if inherits(type(type_), type) else type_ if type(type_) is str else ""
            found[name] = text.rpartition(".")[2]
        function = stored.get("__annotate_func__")  # Python 3.14 and later
        if type(function) is types.FunctionType:
            found |= _annotated_in(function.__code__)
    return found


def _annotated_in(code: types.CodeType) -> dict[str, str]:
    """Return the names in a function that evaluates annotations, each with its type, without calling the function.

    The last instruction before `COPY` has the type if it is a name. It is "" for expressions such as `list[int]`.

    Source: "__annotate__" in https://docs.python.org/3.14/library/annotationlib.html; the instructions are those of
    `codegen_process_deferred_annotations` in CPython's `codegen.c`.
    """
    found: dict[str, str] = {}
    instructions = list(dis.get_instructions(code))
    for loaded, copied, name, stored in zip(*(instructions[at:] for at in range(4)), strict=False):
        if [one.opname for one in (copied, name, stored)] == ["COPY", "LOAD_CONST", "STORE_SUBSCR"]:
            is_name = loaded.opname.startswith("LOAD_") and type(loaded.argval) is str
            found[str(name.argval)] = loaded.argval.rpartition(".")[2] if is_name else ""
    return found


def type_of(stored: Any) -> str:
    """Return the type to show for a value: a kind of Jupyter, such as "function", or the name of its class."""
    kind = type(stored)
    if is_one_of(kind, _FUNCTIONS):
        return "function"
    if is_one_of(kind, _PROPERTIES):
        return "property"
    if inherits(kind, type):
        return "class"
    return "module" if inherits(kind, types.ModuleType) else type_name(kind)


def _types(values: Mapping[str, Any]) -> dict[str, str]:
    return {name: type_of(value) for name, value in values.items()}


def _variables(lookup: Lookup, hidden: Container[str]) -> dict[str, str]:
    """Return the variables of the rank, the names of the lines above, builtins and keywords."""
    found = dict.fromkeys((*keyword.kwlist, *keyword.softkwlist), "keyword") | _types(items(vars(builtins)))
    found |= _types({name: value for name, value in lookup.namespace.items() if name not in hidden})
    for name, (how, _) in list(lookup.assigned.items()):
        value = lookup.variable(name)
        if how in ("function", "class"):
            found[name] = how
        elif value is not None:
            found[name] = type_of(value.value) if value.has_value else type_name(value.kind)
        else:
            found.setdefault(name, "")
    return found


def _parameters(lookup: Lookup, path: str) -> dict[str, str]:
    """Return the parameters of a called function that can be given by name, as `scale=`."""
    called = lookup.find(path) if path else None
    function = called_function(called.value) if called is not None and called.has_value else None
    if type(function) is not types.FunctionType:
        return {}
    code = function.__code__
    names = code.co_varnames[code.co_posonlyargcount : code.co_argcount + code.co_kwonlyargcount]
    return {f"{name}=": "param" for name in names if name not in ("self", "cls")}


def _keys(of: Known) -> dict[str, str] | None:
    """Return the keys of a dict or of a `ModuleDict`, as Python text."""
    if not of.has_value:
        return None
    entries = dict_of(of.value)
    if entries is None:
        entries = list(module_parts(of.value).items())
    return {repr(key): type_of(value) for key, value in entries if is_one_of(type(key), (str, int))}


def _modules(package: str) -> Names:
    """Return the modules in a package; those that can be imported at all for ""."""
    start = f"{package}." if package else ""
    loaded = {name[len(start) :].partition(".")[0] for name in list(sys.modules) if name.startswith(start)}
    if package:
        path = instance_attributes(sys.modules.get(package)).get("__path__")
        folders = [one for one in path if type(one) is str] if type(path) is list else []
        found = loaded | {one.name for one in pkgutil.iter_modules(folders)} if folders else loaded
    else:
        found = loaded | {*sys.stdlib_module_names} | {one.name for one in pkgutil.iter_modules()}
    return [[name, "module"] for name in sorted(found) if name.isidentifier()][:MOST_NAMES]
