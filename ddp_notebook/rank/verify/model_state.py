"""Save and restore models, gradients, random states and variables of a rank.

The state of iterators, of objects of the user's classes and of files is not restored.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, MutableMapping, Sequence
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ddp_notebook.stdlib import gc

_PLAIN = (int, float, bool, str, tuple, NoneType)
_CONTAINERS = (list, dict, set, deque, Counter, defaultdict, OrderedDict)
# Tables of a module by name: tensors, and hooks.
_TABLES = (
    "_parameters",
    "_buffers",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_MOST_DEEP = 4  # nesting of the state of a comm hook


class ModelState:
    """State of this rank at one moment.

    It has the parameters, buffers, gradients, hooks and modes of all modules, the states of DDP models and their comm
    hooks, the random states, and the user's variables with the elements of their containers.

    Args:
        namespace: the user's variables.
        modules: the modules whose state is saved; None: all modules of the process.
        names: variables to save although their names start with an underscore.

    Example:
        >>> model = torch.nn.Linear(1, 1)
        >>> state = ModelState({"model": model})
        >>> before = model.weight.item()
        >>> _ = model.weight.data.zero_()
        >>> state.restore()
        >>> model.weight.item() == before
        True
    """

    def __init__(
        self,
        namespace: MutableMapping[str, Any],
        modules: Sequence[torch.nn.Module] | None = None,
        names: Collection[str] = (),
    ) -> None:
        self._namespace = namespace
        self._variables = {
            name: value for name, value in namespace.items() if not name.startswith("_") or name in names
        }
        self.modules = modules = all_modules() if modules is None else list(modules)
        self._restorers: list[Callable[[], None]] = [
            *(_keep_container(value) for value in self._variables.values() if type(value) in _CONTAINERS),
            *_keep_tensors(self._variables, modules),
            *map(_keep_module, modules),
            *_keep_comm_hooks(modules),
            *_keep_scalers(self._variables.values()),
            *_keep_random_states(self._variables.values()),
        ]
        self.is_in_step = False  # the ranks compute a step together, whose collectives may be interrupted

    def restore(self) -> None:
        """Restore the state. A second call has no further effect."""
        namespace = self._namespace
        for name in [name for name in namespace if not name.startswith("_") and name not in self._variables]:
            del namespace[name]
        namespace.update(self._variables)
        if self.is_in_step:
            for module in self.modules:
                if isinstance(module, DistributedDataParallel):
                    module.reducer._reset_state()  # its backward pass did not end
        for restore in self._restorers:
            restore()
        self.is_in_step = False

    def restore_values(self) -> None:
        """Restore everything except the variables and the elements of their containers, between two steps."""
        for restore in self._restorers:
            restore()


def all_modules() -> list[torch.nn.Module]:
    """Return all modules of the process, whether a variable refers to them or not."""
    return [one for one in gc.get_objects() if issubclass(type(one), torch.nn.Module)]


def _keep_container(container: Any) -> Callable[[], None]:
    elements = list(container.items()) if isinstance(container, dict) else list(container)

    def restore() -> None:
        container.clear()
        if isinstance(container, list | deque):
            container.extend(elements)
        else:
            container.update(dict(elements) if isinstance(container, dict) else elements)

    return restore


def _keep_tensors(
    variables: MutableMapping[str, Any], modules: Iterable[torch.nn.Module]
) -> Iterable[Callable[[], None]]:
    """Yield functions that restore values and gradients of tensors in modules and variables."""
    tensors = {id(value): value for value in _tensors(variables.values(), 2)}
    for module in modules:
        for one in (*module._parameters.values(), *module._buffers.values()):
            if one is not None:
                tensors[id(one)] = one
    for tensor in tensors.values():
        if _has_memory(tensor):
            yield _keep_tensor(tensor)


def _has_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor can be copied. FSDP frees the memory of complete parameters between steps."""
    if tensor.device.type == "meta" or isinstance(tensor, DTensor):
        return tensor.device.type != "meta"
    return not tensor.is_sparse and (tensor.numel() == 0 or tensor.untyped_storage().nbytes() > 0)


def _tensors(values: Iterable[Any], deep: int) -> Iterable[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif deep and isinstance(value, dict):
            yield from _tensors(value.values(), deep - 1)
        elif deep and isinstance(value, list | tuple):
            yield from _tensors(value, deep - 1)


def _keep_tensor(tensor: torch.Tensor) -> Callable[[], None]:
    values, is_leaf, requires_grad = tensor.detach().clone(), tensor.is_leaf, tensor.requires_grad
    gradient = tensor.grad if is_leaf else None
    gradient_values = None if gradient is None else gradient.detach().clone()
    hooks = None if tensor._backward_hooks is None else dict(tensor._backward_hooks)

    def restore() -> None:
        with torch.no_grad():
            tensor.detach().copy_(values)
            if is_leaf:
                tensor.requires_grad_(requires_grad)
                if gradient is not None and gradient_values is not None:
                    gradient.copy_(gradient_values)
                tensor.grad = gradient
        if hooks is not None and tensor._backward_hooks is not None:
            tensor._backward_hooks.clear()
            tensor._backward_hooks.update(hooks)

    return restore


def _keep_module(module: torch.nn.Module) -> Callable[[], None]:
    """Return a function that restores the plain attributes, the tensors by name and the hooks of a module."""
    attributes = vars(module)
    kept = {name: value for name, value in attributes.items() if isinstance(value, (*_PLAIN, torch.Tensor))}
    if isinstance(module, DistributedDataParallel):
        # Other attributes describe the state of its reducer, which a step cannot undo.
        kept = {name: kept[name] for name in ("training", "require_backward_grad_sync", "require_forward_param_sync")}
    tables = {name: attributes[name].copy() for name in _TABLES if isinstance(attributes.get(name), dict)}

    def restore() -> None:
        attributes.update(kept)
        for name, entries in tables.items():
            attributes[name].clear()
            attributes[name].update(entries)

    return restore


def _keep_comm_hooks(modules: Iterable[torch.nn.Module]) -> Iterable[Callable[[], None]]:
    for module in modules:
        for pair in getattr(module, "_comm_hooks", ()):  # the hook may be an object with attributes
            for one in pair:
                if hasattr(one, "__dict__") and not isinstance(one, type | torch.nn.Module):
                    yield _keep_attributes(one)


def _keep_scalers(values: Iterable[Any]) -> Iterable[Callable[[], None]]:
    return [_keep_attributes(value) for value in values if isinstance(value, torch.amp.GradScaler)]


def _keep_attributes(one: Any) -> Callable[[], None]:
    attributes = vars(one)
    kept = {name: _copy(value, _MOST_DEEP) for name, value in attributes.items()}

    def restore() -> None:
        for name in [name for name in attributes if name not in kept]:
            del attributes[name]
        attributes.update({name: _copy(value, _MOST_DEEP) for name, value in kept.items()})

    return restore


def _copy(value: Any, deep: int) -> Any:
    """Copy tensors, containers of them, and NumPy's random generators. Return other values themselves."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if type(value).__name__ == "RandomState":
        copied = type(value)()
        copied.set_state(value.get_state())
        return copied
    if deep and isinstance(value, defaultdict):
        return defaultdict(value.default_factory, {key: _copy(one, deep - 1) for key, one in value.items()})
    if deep and type(value) in (dict, OrderedDict):
        return type(value)((key, _copy(one, deep - 1)) for key, one in value.items())
    if deep and type(value) is list:
        return [_copy(one, deep - 1) for one in value]
    return value


def _keep_random_states(values: Iterable[Any]) -> list[Callable[[], None]]:
    state = RandomState()
    generators = [(one, one.get_state()) for one in values if isinstance(one, torch.Generator)]

    def restore() -> None:
        state.restore()
        for generator, kept in generators:
            generator.set_state(kept)

    return [restore]


class RandomState:
    """The random states of torch, its devices, NumPy and Python."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._python = random.getstate()
        self._numpy = np.random.get_state()
        self._devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def restore(self) -> None:
        """Set all random states."""
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        if self._devices:
            torch.cuda.set_rng_state_all(self._devices)

    @property
    def has_moved(self) -> bool:
        """Return whether random numbers were drawn since then."""
        now = RandomState()
        return (
            not torch.equal(now._torch, self._torch)
            or now._python != self._python
            or any(not np.array_equal(one, two) for one, two in zip(now._numpy, self._numpy, strict=True))
            or any(not torch.equal(one, two) for one, two in zip(now._devices, self._devices, strict=False))
        )
