"""Objects that a training step changes: saved before each step, restored, and sent to a new process.

Parameters and optimizers are equal on all ranks. Each rank saves its own copy, and a new process gets them from any
other rank. All other state is individual: random numbers, buffers, positions, and further objects of the user. The next
rank holds a copy of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ddp_notebook.rank.group.connections import models
from ddp_notebook.rank.survive.step_batches import Batches, is_source
from ddp_notebook.rank.variables import random_states
from ddp_notebook.stdlib import pickle
from ddp_notebook.wire import bulk

Layout = list[list[int]]  # parameter numbers of each bucket; empty: the initial buckets of torch


class Buckets:
    """Buckets of the DDP models among modules."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        inside = (one for module in modules for one in module.modules())
        ddp = (one for one in inside if isinstance(one, DistributedDataParallel))
        self._models = [model for model in ddp if getattr(model, "reducer", None) is not None]
        self._known: list[Layout] = [[] for _ in self._models]

    def settle(self) -> None:
        """Let torch rebuild the buckets now, on all ranks, if the next forward pass would do so."""
        for number, model in enumerate(self._models):
            if not model._has_rebuilt_buckets and model.reducer._rebuild_buckets():
                model._has_rebuilt_buckets = True
            if model._has_rebuilt_buckets and not self._known[number]:
                self._known[number] = models.read_layout(model)

    @property
    def known(self) -> list[Layout]:
        """Return the buckets since they were rebuilt."""
        return self._known

    def make(self, layouts: list[Layout]) -> None:
        """Create new reducers with the buckets of another rank."""
        self._known = layouts
        for model, layout in zip(self._models, layouts, strict=True):
            if layout:
                models.make_reducer_anew(model, layout)


class TrackedObjects:
    """Objects passed to `survive`.

    Args:
        members: modules and optimizers, at most one loader or sampler, and other objects that change: objects with a
            `state_dict`, lists, dicts, sets, tensors, arrays and random generators.

    Raises:
        TypeError: an object cannot be restored.
    """

    def __init__(self, members: Sequence[Any]) -> None:
        self.modules = [one for one in members if isinstance(one, torch.nn.Module)]
        self.buckets = Buckets(self.modules)
        self.optimizers = [one for one in members if isinstance(one, torch.optim.Optimizer)]
        sources = [one for one in members if is_source(one)]
        if len(sources) > 1:
            raise TypeError(f"survive() takes one loader or sampler for the batches, got {len(sources)}")
        self.batches = Batches(sources[0]) if sources else None
        known = [*self.modules, *self.optimizers, *sources]
        self._others = [one for one in members if not any(one is other for other in known)]
        for one in self._others:
            _putting_back(one)  # raises the error now if the object cannot be restored
        self._kept: list[Any] = []  # saved state of modules and optimizers

    # ---- the same on all ranks

    def keep(self) -> None:
        """Save the current parameters and optimizers."""
        self._kept = _copied(self._shared(), self._kept)

    def put_back(self) -> None:
        """Restore the saved parameters and optimizers."""
        self._load(copy.deepcopy(self._kept))

    def shared(self) -> bytes:
        """Serialize parameters, optimizers and the buckets of DDP, for `take_shared` of another process."""
        return bulk.dumps((self.buckets.known, self._shared()))

    def take_shared(self, data: bytes) -> None:
        """Load the state of another process."""
        buckets, shared = pickle.loads(data)
        self._load(shared)
        self.buckets.make(buckets)

    def _shared(self) -> list[Any]:
        parameters = [[p.detach() for p in module.parameters()] for module in self.modules]
        return [parameters, [optimizer.state_dict() for optimizer in self.optimizers]]

    def _load(self, shared: list[Any]) -> None:
        parameters, states = shared
        with torch.no_grad():
            for module, values in zip(self.modules, parameters, strict=True):
                for parameter, value in zip(module.parameters(), values, strict=True):
                    parameter.copy_(value)
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)

    def forget_gradients(self) -> None:
        """Delete all gradients before a step, because those of an aborted step are useless."""
        for module in self.modules:
            module.zero_grad(set_to_none=True)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    # ---- a rank's own

    def own(self, step: int) -> bytes:
        """Serialize this rank's individual state before a step, for `take_own` of this process or its replacement."""
        position = None if self.batches is None else self.batches.position(step)
        buffers = [[b.detach() for b in module.buffers()] for module in self.modules]
        return bulk.dumps((random_states.read(), position, buffers, [_value_of(one) for one in self._others]))

    def take_own(self, data: bytes, new_at: int | None = None) -> None:
        """Restore the state of `own`.

        Args:
            data: serialized state.
            new_at: step with which a new process starts; None in an existing process.
        """
        states, position, buffers, values = pickle.loads(data)
        if new_at is not None and self.batches is not None and position is not None:
            self.batches.go_to(new_at, position)
        with torch.no_grad():
            for module, ones in zip(self.modules, buffers, strict=True):
                for buffer, value in zip(module.buffers(), ones, strict=True):
                    buffer.copy_(value)
        for one, value in zip(self._others, values, strict=True):
            _putting_back(one)(value)
        random_states.restore(states)


def _copied(value: Any, into: Any = None) -> Any:
    """Copy nested lists, dicts and tensors, into the memory of an earlier copy if it fits."""
    if isinstance(value, torch.Tensor):
        fits = isinstance(into, torch.Tensor) and into.shape == value.shape and into.dtype == value.dtype
        if fits and into.device == value.device:
            into.copy_(value)
            return into
        return value.detach().clone()
    if isinstance(value, dict):
        earlier = into if isinstance(into, dict) else {}
        return {key: _copied(one, earlier.get(key)) for key, one in value.items()}
    if isinstance(value, list):
        fitting = into if isinstance(into, list) and len(into) == len(value) else [None] * len(value)
        return [_copied(*pair) for pair in zip(value, fitting, strict=True)]
    return value if isinstance(value, int | float | bool | str | tuple | type(None)) else copy.deepcopy(value)


def _value_of(member: Any) -> Any:
    if isinstance(member, torch.Generator):
        return member.get_state()
    return member.state_dict() if hasattr(member, "load_state_dict") else member


def _putting_back(member: Any) -> Callable[[Any], object]:
    """Return a function that restores an earlier value of an object.

    The object is changed in place, because other objects may refer to it.
    """
    if hasattr(member, "state_dict") and hasattr(member, "load_state_dict"):
        return member.load_state_dict
    if isinstance(member, torch.Generator):
        return member.set_state
    if isinstance(member, torch.Tensor):
        return lambda value: member.detach().copy_(value)
    if isinstance(member, list):
        return lambda value: member.__setitem__(slice(None), value)
    if isinstance(member, dict | set):
        return lambda value: (member.clear(), member.update(value))
    if type(member).__module__ == "numpy" and hasattr(member, "dtype"):
        return lambda value: member.__setitem__(..., value)
    raise TypeError(
        f"survive() cannot restore a {type(member).__name__}: pass modules, optimizers, a loader or sampler, objects "
        "with state_dict, lists, dicts, sets, tensors, arrays or generators"
    )
