"""A copy of a rank's variables and random state that is put back in place.

Objects stay the same objects: only their contents are restored. So an optimizer still has the parameters of its model,
and views and tied weights still share memory. The walk follows containers, attributes, closures and tensors from the
user's variables on. Modules of Python and classes of libraries are left out.
"""

from __future__ import annotations

import multiprocessing.process
import random
import subprocess
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import dataloader

from ddp_notebook.rank.group.connections.models import make_reducer_anew, read_layout
from ddp_notebook.rank.variables import random_states
from ddp_notebook.records import logs
from ddp_notebook.stdlib import contextlib, functools, io, logging, socket, threading, weakref

_MOST_OBJECTS = 5_000_000
_PLAIN = (int, float, complex, bool, str, bytes, type(None), range, slice, torch.dtype, torch.device, torch.Size)
# Objects without state of the program, or with state that a cell does not change.
_IGNORED = (types.ModuleType, types.CodeType, logging.Logger, logging.Handler, weakref.ref, property)
_OPEN = (  # objects whose position or process cannot be copied
    *(io.IOBase, socket.socket, subprocess.Popen, multiprocessing.process.BaseProcess, threading.Thread),
    *(types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType, dataloader._MultiProcessingDataLoaderIter),
)
_GENERATORS = (
    *(torch.Generator, random.Random),
    *(np.random.RandomState, np.random.BitGenerator, np.random.Generator),
)
_OF_DDP = ("reducer", "logger")  # a second reference would keep the hooks of an old reducer
Action = Callable[[], object]


class Snapshot:
    """A copy of the state that variables reach. Make it in the main thread, between two cells.

    Args:
        namespace: the user's variables.
        hidden: names that do not belong to the user.
        roots: further objects whose contents are restored.
        reducers: restore the attributes and the reducers of DDP models.

    Attributes:
        nbytes: size of the copies of tensors and arrays.
        left: reasons for objects that cannot be copied, by their place: "reader.file".

    Example:
        >>> weight = torch.zeros(2, requires_grad=True)
        >>> variables = {"weight": weight, "view": weight.detach()[1:], "history": [1]}
        >>> snapshot = Snapshot(variables)
        >>> snapshot.take()
        >>> variables["view"].add_(1), variables["history"].append(2), variables.update(new=3)
        (tensor([1.]), None, None)
        >>> snapshot.put_back()
        >>> variables["weight"] is weight, variables
        (True, {'weight': tensor([0., 0.], requires_grad=True), 'view': tensor([0.]), 'history': [1]})
    """

    def __init__(
        self,
        namespace: MutableMapping[str, Any],
        hidden: Collection[str] = (),
        *,
        roots: Collection[Any] = (),
        reducers: bool = True,
    ) -> None:
        self._namespace = namespace
        self._roots = roots
        self._reducers = reducers
        self._hidden = {*hidden, "In", "Out", "_ih", "_oh", "_dh", "get_ipython", "__builtins__"}
        self.nbytes = 0
        self.left: dict[str, str] = {}
        self._seen: dict[int, Any] = {}
        self._tensors: set[int] = set()  # ids of the tensors
        self._found: list[Any] = []  # objects with contents to restore
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._put_back: list[Action] = []
        self._models: list[tuple[DistributedDataParallel, list[list[int]]]] = []  # with their rebuilt buckets
        self._walk()

    def reaches(self, tensor: torch.Tensor) -> bool:
        """Return whether the variables referred to this tensor, directly or through others, at the time of `take`."""
        return id(tensor) in self._tensors

    # ---- finding the state

    def _names(self) -> list[str]:
        return [
            name
            for name, value in self._namespace.items()
            if name not in self._hidden and not _is_of_ipython(name) and not logs.is_log(value)
        ]

    def _walk(self) -> None:
        waiting = deque((name, self._namespace[name]) for name in self._names())
        waiting.extend((type(one).__name__, one) for one in self._roots)
        while waiting:
            place, value = waiting.popleft()
            kind = type(value)
            if kind in _PLAIN or id(value) in self._seen or _is_ignored(value, kind):
                continue
            self._seen[id(value)] = value
            if len(self._seen) > _MOST_OBJECTS:
                self.left[place] = f"the variables hold more than {_MOST_OBJECTS:,} objects"
                return
            if issubclass(kind, _OPEN) or (hasattr(kind, "__next__") and _attributes(value) is None):
                self.left[place] = f"a {kind.__name__}"
                continue
            try:
                children = list(self._children(value, kind))
            except Exception as error:  # an object of the user that rejects inspection
                self.left[place] = f"a {kind.__name__} cannot be inspected ({type(error).__name__})"
                continue
            waiting.extend((f"{place}{name}", child) for name, child in children)

    def _children(self, value: Any, kind: type) -> Iterator[tuple[str, Any]]:
        """Yield the objects that an object refers to, and note the object if it has contents to restore."""
        if issubclass(kind, torch.Tensor):
            if not is_stale(value):
                yield from self._of_tensor(value)
        elif issubclass(kind, np.ndarray):
            yield from self._of_array(value)
        elif issubclass(kind, tuple | frozenset):
            yield from (("[...]", one) for one in value)
        elif issubclass(kind, types.FunctionType):
            yield from ((".__closure__", cell) for cell in value.__closure__ or ())
            yield from ((".__defaults__", one) for one in (value.__defaults__, value.__kwdefaults__, vars(value)))
        elif issubclass(kind, types.CellType):
            self._found.append(value)
            with contextlib.suppress(ValueError):  # the cell is empty
                yield "", value.cell_contents
        elif issubclass(kind, types.MethodType | types.BuiltinMethodType):
            yield "", value.__self__
        elif issubclass(kind, functools.partial):
            yield from ((".partial", one) for one in (value.func, value.args, value.keywords))
        elif issubclass(kind, type):
            if value.__module__ == "__main__":
                self._found.append(value)
                yield from ((f".{name}", one) for name, one in vars(value).items())
        else:
            yield from self._of_object(value, kind)

    def _of_object(self, value: Any, kind: type) -> Iterator[tuple[str, Any]]:
        self._found.append(value)
        if issubclass(kind, dict):
            yield from ((f"[{key!r:.20}]", one) for key, one in dict.items(value))
            yield from (("[key]", key) for key in dict.keys(value))
        elif issubclass(kind, list | set | deque):
            yield from ((f"[{number}]", one) for number, one in enumerate(value))
        attributes = _attributes(value)
        if attributes is not None:
            skipped = _OF_DDP if issubclass(kind, DistributedDataParallel) else ()
            yield from ((f".{name}", one) for name, one in attributes.items() if name not in skipped)
        yield from ((f".{name}", getattr(value, name)) for name in _slots(kind) if hasattr(value, name))

    def _of_tensor(self, value: torch.Tensor) -> Iterator[tuple[str, Any]]:
        self._found.append(value)
        if torch.nn.parameter.is_lazy(value):  # it has no values yet
            return
        if value.is_leaf and value.grad is not None:
            yield ".grad", value.grad
        yield from ((f".{name}", one) for name, one in vars(value).items())
        if inner := getattr(value, "_local_tensor", None) is not None:
            yield "._local_tensor", value._local_tensor  # type: ignore[attr-defined]
        if inner or value.is_meta:
            return
        if value.layout is not torch.strided:
            if (nbytes := _nbytes_of_sparse(value)) < 0:
                self.left[f"a {value.layout} tensor"] = "such tensors are not copied"
            self.nbytes += max(0, nbytes)
            return
        storage = value.untyped_storage()
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = storage
            self.nbytes += storage.nbytes()

    def _of_array(self, value: Any) -> Iterator[tuple[str, Any]]:
        if value.dtype.hasobject:
            yield from (("[...]", one) for one in value.reshape(-1).tolist())
        if isinstance(value.base, np.ndarray):
            yield ".base", value.base
        elif value.flags.writeable:
            self._found.append(value)
            self.nbytes += value.nbytes

    # ---- copying it

    def take(self) -> None:
        """Copy the state.

        Raises:
            MemoryError: there is not enough memory.
        """
        names = {name: self._namespace[name] for name in self._names()}
        put_back: list[Action] = [functools.partial(self._bind, names)]
        for value in self._found:
            if isinstance(value, DistributedDataParallel) and not self._reducers:
                continue
            put_back += _keeping(value)
            if isinstance(value, DistributedDataParallel) and getattr(value, "reducer", None) is not None:
                self._models.append((value, read_layout(value) if value._has_rebuilt_buckets else []))
        for storage in self._storages.values():
            put_back.append(functools.partial(_fill, storage, storage.cpu().clone()))
        put_back.append(functools.partial(random_states.restore, random_states.read(all_devices=True)))
        self._put_back = put_back
        self._tensors = {key for key, value in self._seen.items() if isinstance(value, torch.Tensor)}
        self._seen.clear()  # `_found` and the copies refer to everything that is needed

    def put_back(self, *, resets_models: bool = False) -> None:
        """Restore the state of `take`.

        Args:
            resets_models: DDP models may be within a backward, so they need new reducers.
        """
        # A reducer orders its buckets after its first backward, and the order is part of the result of a sum.
        others = [
            (model, layout)
            for model, layout in self._models
            if resets_models or model._has_rebuilt_buckets != bool(layout)
        ]
        with torch.no_grad():
            for put_back in self._put_back:
                put_back()
        for model, layout in others:
            make_reducer_anew(model, layout)

    def _bind(self, names: Mapping[str, Any]) -> None:
        for name in self._names():
            if name not in names:
                del self._namespace[name]
        self._namespace.update(names)


def _is_of_ipython(name: str) -> bool:
    return name.startswith("_i") or not name.strip("_") or (name[0] == "_" and name[1:].isdigit())


def _is_ignored(value: Any, kind: type) -> bool:
    if issubclass(kind, _IGNORED):
        return True
    if value is sys.stdout or value is sys.stderr or value is sys.__stdout__ or value is sys.__stderr__:
        return True
    module = kind.__module__ or ""
    # Objects of torch in C++, such as process groups; generators and tensors have copies.
    return module.startswith("torch._C") and not issubclass(kind, torch.Generator | torch.Tensor)


def _attributes(value: Any) -> dict[str, Any] | None:
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return found if type(found) is dict else None


def _slots(kind: type) -> Iterator[str]:
    for one in kind.__mro__:
        slots = one.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and not name.startswith("__"):
                yield name


# ---- functions that restore one object


def _keeping(value: Any) -> list[Action]:
    """Return functions that restore the present contents of an object."""
    kind = type(value)
    if issubclass(kind, torch.Tensor):
        return _keeping_tensor(value)
    if issubclass(kind, np.ndarray):
        return [functools.partial(np.copyto, value, value.copy())]
    if issubclass(kind, types.CellType):
        return _keeping_cell(value)
    if issubclass(kind, type):
        return [functools.partial(_set_class, value, dict(vars(value)))]
    found: list[Action] = []
    if issubclass(kind, _GENERATORS):
        found += _keeping_generator(value)
    elif issubclass(kind, dict):
        found.append(functools.partial(_set_dict, value, list(_methods(value).items(value))))
    elif issubclass(kind, list):
        found.append(functools.partial(list.__setitem__, value, slice(None), list(value)))
    elif issubclass(kind, bytearray):
        found.append(functools.partial(value.__setitem__, slice(None), bytes(value)))
    elif issubclass(kind, set):
        found += [functools.partial(set.clear, value), functools.partial(set.update, value, set(value))]
    elif issubclass(kind, deque):
        found += [functools.partial(deque.clear, value), functools.partial(deque.extend, value, list(value))]
    attributes = _attributes(value)
    if attributes is not None:
        kept = _OF_DDP if issubclass(kind, DistributedDataParallel) else ()
        copied = {name: one for name, one in attributes.items() if name not in kept}
        found.append(functools.partial(_set_attributes, attributes, copied, kept))
    if issubclass(kind, torch.nn.modules.lazy.LazyModuleMixin):  # its first forward changes its class
        found.append(functools.partial(setattr, value, "__class__", kind))
    found += [
        functools.partial(object.__setattr__, value, name, getattr(value, name))
        for name in _slots(kind)
        if hasattr(value, name) and isinstance(getattr(kind, name, None), types.MemberDescriptorType)
    ]
    return found


def _keeping_generator(value: Any) -> list[Action]:
    """Return a function that restores a generator of random numbers."""
    if isinstance(value, torch.Generator):
        return [functools.partial(value.set_state, value.get_state())]
    if isinstance(value, random.Random):
        return [functools.partial(value.setstate, value.getstate())]
    if isinstance(value, np.random.RandomState):
        return [functools.partial(value.set_state, value.get_state(legacy=False))]
    bits = value.bit_generator if isinstance(value, np.random.Generator) else value
    return [functools.partial(setattr, bits, "state", bits.state)]


def _nbytes_of_sparse(value: torch.Tensor) -> int:
    """Return the size of a sparse tensor; -1 for another layout."""
    if value.layout is torch.sparse_coo:
        parts = [value._indices(), value._values()]
    elif value.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [value.crow_indices(), value.col_indices(), value.values()]
    elif value.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = [value.ccol_indices(), value.row_indices(), value.values()]
    else:
        return -1
    return sum(one.numel() * one.element_size() for one in parts)


def _keeping_sparse(value: torch.Tensor) -> list[Action]:
    """Return a function that restores a sparse tensor, also if it has another number of elements by then."""
    saved = value.detach().clone()
    gradient = value.grad if value.is_leaf else None

    def put_back() -> None:
        value.data = saved.clone()  # the copy must not change in the second run
        if value.is_leaf and value.grad is not gradient:
            value.grad = gradient

    return [put_back]


def _keeping_lazy(value: Any) -> list[Action]:
    """Return a function that makes a parameter or buffer uninitialized again, if its module has given it a shape."""
    kind, attributes = type(value), dict(vars(value))
    empty = functools.partial(torch.empty, 0, dtype=value.data.dtype, device=value.data.device)

    def put_back() -> None:
        if type(value) is not kind:
            value.grad = None
            value.data = empty()
            value.__class__ = kind
            vars(value).clear()
            vars(value).update(attributes)

    return [put_back]


def _keeping_tensor(value: torch.Tensor) -> list[Action]:
    if torch.nn.parameter.is_lazy(value):
        return _keeping_lazy(value)
    if _nbytes_of_sparse(value) >= 0:
        return _keeping_sparse(value)
    gradient, alias, requires_grad = value.grad if value.is_leaf else None, value.detach(), value.requires_grad
    attributes = dict(vars(value))
    is_plain = getattr(value, "_local_tensor", None) is None and not value.is_meta and value.layout is torch.strided
    local = getattr(value, "_local_tensor", None)
    is_leaf = value.is_leaf

    def put_back() -> None:
        if vars(value) != attributes:
            vars(value).clear()
            vars(value).update(attributes)
        if local is not None and value._local_tensor is not local:  # type: ignore[attr-defined]
            value._local_tensor = local  # type: ignore[attr-defined]
        if is_plain and _layout(value) != _layout(alias):
            value.data = alias
        if is_leaf and value.is_leaf and value.requires_grad != requires_grad:
            value.requires_grad_(requires_grad)
        if is_leaf and value.grad is not gradient:
            value.grad = gradient

    return [put_back]


def is_stale(value: torch.Tensor) -> bool:
    """Return whether a tensor is a view that FSDP 1 has replaced. Reading its attributes raises an error."""
    try:
        return value.is_leaf is None
    except RuntimeError:
        return True


def _layout(value: torch.Tensor) -> tuple[object, ...]:
    return value.untyped_storage()._cdata, value.storage_offset(), value.shape, value.stride(), value.dtype


def _keeping_cell(value: types.CellType) -> list[Action]:
    try:
        return [functools.partial(setattr, value, "cell_contents", value.cell_contents)]
    except ValueError:  # the cell is empty
        return []


def _set_class(value: type, attributes: Mapping[str, Any]) -> None:
    for name in [name for name in vars(value) if name not in attributes]:
        delattr(value, name)
    for name, one in attributes.items():
        if vars(value).get(name) is not one:
            with contextlib.suppress(AttributeError, TypeError):  # an attribute of Python itself
                setattr(value, name, one)


def _methods(value: dict[Any, Any]) -> type[dict[Any, Any]]:
    """Return the class whose methods read and change a dict, without those that a subclass overrides.

    An `OrderedDict` has its own order, which the methods of `dict` do not change.
    """
    return OrderedDict if isinstance(value, OrderedDict) else dict


def _set_dict(value: dict[Any, Any], items: list[tuple[Any, Any]]) -> None:
    methods = _methods(value)
    if list(methods.keys(value)) != [key for key, _ in items]:
        methods.clear(value)
    for key, one in items:
        methods.__setitem__(value, key, one)


def _set_attributes(value: dict[str, Any], items: Mapping[str, Any], kept: Collection[str]) -> None:
    for name in [name for name in value if name not in items and name not in kept]:
        del value[name]
    value.update(items)


def _fill(storage: torch.UntypedStorage, saved: torch.UntypedStorage) -> None:
    if storage.nbytes() != saved.nbytes():
        storage.resize_(saved.nbytes())
    storage.copy_(saved)
