"""Run a training cell on one rank without communication, as a baseline, and undo its effects.

Collectives return at once, with the rank's own input in place of the other ranks' inputs. The cell is stopped after
some steps. Then parameters, buffers, gradients, optimizers, schedulers, random state and the user's variables are
restored. Lists, dicts and sets get their elements back. The state of iterators and of objects of the user's classes is
not restored.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

from ddp_notebook.rank.group.local_collectives import LocalCollectives
from ddp_notebook.rank.variables import random_states
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import functools, gc, time


class EnoughStepsError(BaseException):
    """The cell has taken the requested number of steps. `except Exception` in user code does not catch this."""


class BaselineRun:
    """One cell without communication. Made in the main thread, before the cell starts.

    Args:
        namespace: the user's variables.
        steps: maximum number of optimizer steps of the cell.
        seconds: time limit; the cell ends at the first step after it.
    """

    def __init__(self, namespace: MutableMapping[str, Any], steps: int, seconds: float) -> None:
        self._namespace = namespace
        self._variables = dict(namespace)
        self._put_back = [
            *_keep_containers(namespace),
            *_keep_tensors(namespace),
            *_keep_optimizers(namespace),
            *_keep_random_state(namespace),
        ]
        self.run = LocalCollectives().run
        self._steps = steps
        self._until = time.monotonic() + seconds

    def on_step(self) -> None:
        """Count an optimizer step.

        Raises:
            EnoughStepsError: it is the last step.
        """
        self._steps -= 1
        if self._steps <= 0 or time.monotonic() > self._until:
            raise EnoughStepsError

    def end(self) -> None:
        """Restore the state from before the cell."""
        for name in [name for name in self._namespace if name not in self._variables]:
            del self._namespace[name]
        self._namespace.update(self._variables)
        for put_back in self._put_back:
            put_back()


def _alive(*kinds: type) -> list[Any]:
    """Return all objects of these types in the process. Variables may not refer to some of them, but ranks must not
    diverge."""
    return [one for one in gc.get_objects() if issubclass(type(one), kinds)]


def _keep_containers(namespace: Mapping[str, Any]) -> list[Callable[[], None]]:
    put_back: list[Callable[[], None]] = []
    for name, value in namespace.items():
        if name.startswith("_"):  # variables of IPython
            continue
        if type(value) in (list, deque):
            put_back.append(functools.partial(_refill, value, list(value), value.extend))
        elif type(value) in (dict, set, Counter, defaultdict, OrderedDict):
            put_back.append(functools.partial(_refill, value, copy.copy(value), value.update))
    return put_back


def _refill(container: Any, elements: Any, add: Callable[[Any], None]) -> None:
    container.clear()
    add(elements)


def _keep_tensors(namespace: Mapping[str, Any]) -> list[Callable[[], None]]:
    """Return functions that restore the tensors and gradients of modules, and the tensors in variables."""
    tensors = {id(one): one for one in namespace.values() if isinstance(one, torch.Tensor)}
    modes: list[tuple[torch.nn.Module, bool]] = []
    for module in _alive(torch.nn.Module):
        modes.append((module, module.training))
        for one in (*module._parameters.values(), *module._buffers.values()):
            if one is not None:
                tensors[id(one)] = one
    kept = [
        (one, one.detach().clone(), None if gradient is None else (gradient, gradient.detach().clone()))
        for one in tensors.values()
        for gradient in (one.grad if one.is_leaf else None,)
    ]

    def put_back() -> None:
        for module, is_training in modes:
            module.training = is_training
        with torch.no_grad():
            for one, values, gradient in kept:
                one.detach().copy_(values)
                if one.is_leaf:
                    one.grad = None
                if gradient is not None:
                    gradient[0].copy_(gradient[1])
                    one.grad = gradient[0]

    return [put_back]


def _keep_optimizers(namespace: Mapping[str, Any]) -> list[Callable[[], None]]:
    """Return functions that restore optimizers and other objects with a state: schedulers, scalers, samplers."""
    found = {
        id(value): value
        for value in (*namespace.values(), *_alive(torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler))
        if hasattr(value, "load_state_dict") and hasattr(value, "state_dict") and not isinstance(value, type)
    }
    put_back: list[Callable[[], None]] = []
    for value in found.values():
        if not isinstance(value, torch.nn.Module | ZeroRedundancyOptimizer):  # its optimizer is found too
            state = copy.deepcopy(value.state_dict())
            put_back.append(functools.partial(value.load_state_dict, state))
    return put_back


def _keep_random_state(namespace: Mapping[str, Any]) -> list[Callable[[], None]]:
    put_back: list[Callable[[], None]] = [functools.partial(random_states.restore, random_states.read())]
    for value in namespace.values():
        if isinstance(value, torch.Generator):
            put_back.append(functools.partial(_set_state, value, value.get_state()))
    return put_back


def _set_state(generator: torch.Generator, state: torch.Tensor) -> None:
    generator.set_state(state)
