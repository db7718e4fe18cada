"""Facts about the last out-of-memory error of this rank, noted while the frames of the error exist.

The saved tensors of autograd are read through the graphs of the tensors in these frames. A node that uses parameters
belongs to the module of the parameters. Other nodes belong to the module whose result they process. A tensor counts
once, for the last node that has saved it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from ddp_notebook.rank import reserve
from ddp_notebook.rank.cell.exceptions import chain
from ddp_notebook.rank.sharding.memory import held
from ddp_notebook.records import shortages
from ddp_notebook.records.error_text import text_of
from ddp_notebook.stdlib import contextlib, re, time

_REQUESTED = re.compile(
    r"(?:tried to allocate|unable to allocate) ([\d.]+) ?(bytes|KiB|MiB|GiB|TiB)?", re.IGNORECASE
)  # the second one is from NumPy
_UNITS = {"bytes": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_MOST_NODES = 20_000
_MOST_STEPS = 32  # nodes between a node and the parameters of its module
_MOST_MODULES = 64
FACT = "out-of-memory"  # name of the fact that the notebook gets
_last: dict[str, Any] | None = None
_is_new = False  # the notebook does not have the last facts yet


def note(
    error: BaseException,
    namespace: Mapping[str, Any],
    site: Callable[[TracebackType | None], str],
    history: Callable[[], Mapping[str, Any]] = dict,
) -> None:
    """Note the facts if an error of a cell is about memory.

    Args:
        error: the error, with its traceback.
        namespace: variables of the cell.
        site: returns the line of the user's code in a traceback.
        history: returns the summary of the allocator's history, see `allocator_history`.
    """
    global _last, _is_new
    if not any(is_about_memory(one) for one in chain(error)):
        return
    with reserve.lent(), contextlib.suppress(Exception):  # a user object may raise, and memory may be used up again
        _last = None  # an earlier error must not explain this one
        _last = _facts(error, namespace, site)
        if _last["is_of_gpu"]:
            _last["history"] = history()
        _is_new = True


def is_about_memory(error: BaseException) -> bool:
    """Return whether an allocation has failed.

    Example:
        >>> is_about_memory(MemoryError()), is_about_memory(ValueError("no"))
        (True, False)
    """
    kinds = shortages.kinds(error)  # EAGAIN may also mean that no thread can start, or that a socket is not ready
    return isinstance(error, torch.OutOfMemoryError) or (shortages.MEMORY in kinds and shortages.PROCESSES not in kinds)


def take_fact() -> list[list[Any]]:
    """Return the facts of an error of this cell for `CellDone`, once; [] if there was none."""
    global _is_new
    if not _is_new or _last is None:
        return []
    _is_new = False
    return [[FACT, 0, _last]]


def told() -> dict[str, Any]:
    """Return the facts of the last error, or {}, and the memory of this process now, as JSON values."""
    return {"last": _last or {}, "now": _process()}


def requested_bytes(text: str) -> int:
    """Return the size of the failed allocation in bytes, from the text of the error; -1 if the text has none.

    Example:
        >>> requested_bytes("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4000 bytes. Error")
        4000
        >>> requested_bytes("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has")
        2684354560
        >>> requested_bytes("Unable to allocate 2.00 MiB for an array with shape (512, 512) and data type float64")
        2097152
    """
    found = _REQUESTED.search(text)
    return -1 if found is None else round(float(found[1].rstrip(".")) * _UNITS[(found[2] or "bytes").lower()])


def _facts(
    error: BaseException, namespace: Mapping[str, Any], site: Callable[[TracebackType | None], str]
) -> dict[str, Any]:
    failed = next(one for one in chain(error) if is_about_memory(one))
    text = text_of(failed)
    frames = list(_frames(failed.__traceback__))
    names = _names(namespace)
    of_models = _storages_of_models(namespace)
    by_module = _activations([*frames, namespace], names, of_models)
    modules = [names[id(one)] for frame in frames if id(one := frame.get("self")) in names]
    return {
        "text": text.splitlines()[0][:300] if text else type(failed).__name__,
        "site": site(failed.__traceback__),
        "module": modules[-1] if modules else "",
        "requested": requested_bytes(text),
        "worker": shortages.worker_of(failed),
        "is_of_gpu": isinstance(failed, torch.OutOfMemoryError),
        "activations": dict(by_module.most_common(_MOST_MODULES)),
        "variables": _variables(namespace, of_models),
        "time_ns": time.monotonic_ns(),
        **held(namespace),
        **_process(),
    }


def _process() -> dict[str, Any]:
    """Return the resident memory of this process, and the tightest limit: see `memory_limits`."""
    found: dict[str, Any] = {"rss": -1, "peak_rss": -1, "limit": None, "gpu": None}
    with contextlib.suppress(OSError, ValueError, KeyError):
        found["rss"], found["peak_rss"] = shortages.resident_memory()
        found["limit"] = next(iter(shortages.memory_limits(reserve.lent_bytes())), None)
    if torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info()
        own = torch.cuda.memory_reserved()
        found["gpu"] = {
            "allocated": torch.cuda.memory_allocated(),
            "reserved": own,
            "total": total,
            "free": free,
            "others": max(0, total - free - own),
        }
    return found


def _frames(traceback: TracebackType | None) -> Iterator[Mapping[str, Any]]:
    while traceback is not None:
        yield traceback.tb_frame.f_locals
        traceback = traceback.tb_next


def _names(namespace: Mapping[str, Any]) -> dict[int, str]:
    """Return the names of the modules in variables, by their identity: "model.layers.0"."""
    names: dict[int, str] = {}
    for variable, value in namespace.items():
        if issubclass(type(value), torch.nn.Module) and not variable.startswith("_"):
            for name, module in torch.nn.Module.named_modules(value):
                names.setdefault(id(module), f"{variable}.{name}" if name else variable)
    return names


def _modules_of_parameters(namespace: Mapping[str, Any], names: Mapping[int, str]) -> dict[int, str]:
    found: dict[int, str] = {}
    for value in namespace.values():
        if issubclass(type(value), torch.nn.Module):
            for module in torch.nn.Module.modules(value):
                for parameter in module._parameters.values():
                    if parameter is not None:
                        found.setdefault(id(parameter), names.get(id(module), ""))
    return found


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Return the storage of a tensor, or of this rank's part of a DTensor, whose own storage has no memory."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()


def _storages_of_models(namespace: Mapping[str, Any]) -> set[int]:
    """Return the addresses of parameters and buffers, which do not count as activations."""
    return {
        _storage(tensor).data_ptr()
        for value in namespace.values()
        if issubclass(type(value), torch.nn.Module)
        for tensor in (*torch.nn.Module.parameters(value), *torch.nn.Module.buffers(value))
        if tensor.device.type != "meta"
    }


def _variables(namespace: Mapping[str, Any], known: set[int]) -> dict[str, int]:
    """Return the bytes of tensors and arrays in variables, in their lists, and in attributes of modules, by name."""
    found: Counter[str] = Counter()
    seen = set(known)
    for name, value in [*namespace.items(), *_attributes_of_modules(namespace)]:
        if name.startswith("_"):
            continue
        for one in _contents(value):
            address, nbytes = _memory_of(one)
            if address not in seen:
                seen.add(address)
                found[name] += nbytes
    return dict(found.most_common(8))


def _attributes_of_modules(namespace: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield name and value of the attributes of modules in variables, without parameters and buffers: "model.kept"."""
    for variable, value in namespace.items():
        if issubclass(type(value), torch.nn.Module):
            for path, module in torch.nn.Module.named_modules(value, prefix=variable):
                for name, one in module.__dict__.items():
                    if name not in ("_parameters", "_buffers", "_modules"):
                        yield f"{path}.{name}", one


def _memory_of(value: torch.Tensor | np.ndarray[Any, Any]) -> tuple[int, int]:
    """Return the address and the bytes of the memory that a tensor or an array uses, perhaps with others."""
    if isinstance(value, torch.Tensor):
        storage = _storage(value)
        return storage.data_ptr(), 0 if value.device.type == "meta" else storage.nbytes()
    while isinstance(value.base, np.ndarray):
        value = value.base
    return value.ctypes.data, value.nbytes


def _contents(value: Any, depth: int = 2) -> Iterator[Any]:
    """Yield the tensors and arrays in a value."""
    if issubclass(type(value), torch.Tensor):
        if value.layout is torch.strided:  # a sparse tensor has no storage
            yield value
    elif issubclass(type(value), np.ndarray):
        yield value
    elif depth and type(value) in (list, tuple, dict):
        for one in value.values() if type(value) is dict else value:
            yield from _contents(one, depth - 1)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (one for one in _contents(value) if isinstance(one, torch.Tensor))


def _activations(places: list[Mapping[str, Any]], names: Mapping[int, str], known: set[int]) -> Counter[str]:
    """Return the bytes of tensors that autograd has saved, by module.

    Args:
        places: variables of frames, and of the cell at the end.
        names: names of modules by identity.
        known: addresses of storages that do not count.
    """
    owners = _modules_of_parameters(places[-1], names)
    found: Counter[str] = Counter()
    seen: set[Any] = set()
    known = set(known)
    waiting = [one.grad_fn for place in places for value in list(place.values()) for one in _tensors(value)]
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        own = 0
        for tensor in _saved(node):
            if tensor.layout is not torch.strided:
                continue
            storage = _storage(tensor)
            if storage.data_ptr() not in known:
                known.add(storage.data_ptr())
                own += storage.nbytes()
        if own:
            found[_module_of(node, owners)] += own
        waiting += [after for after, _ in node.next_functions]
    return found


def _module_of(node: Any, owners: Mapping[int, str]) -> str:
    """Return the module of the first parameters on the way from a node to the inputs; "" if there are none."""
    seen: set[Any] = set()
    waiting = [node]
    while waiting and len(seen) < _MOST_STEPS:
        one = waiting.pop(0)
        if one is None or one in seen:
            continue
        seen.add(one)
        if (name := owners.get(id(getattr(one, "variable", None)))) is not None:
            return name
        waiting += [after for after, _ in one.next_functions]
    return ""


def _saved(node: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that a node has saved for its backward, without calls of their unpacking hooks."""
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            with contextlib.suppress(Exception):  # the backward has released them, or this torch has no `data`
                raw = getattr(node, name)
                for one in raw if isinstance(raw, list | tuple) else (raw,):
                    if isinstance(one.data, torch.Tensor):
                        yield one.data
