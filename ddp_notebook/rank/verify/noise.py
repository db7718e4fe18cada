"""Silence modules that drop values or use statistics of their batch, and find random numbers of other code."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ddp_notebook.rank.variables import random_states
from ddp_notebook.stdlib import contextlib

NOTHING, NOISY_MODULES, ALL_MODULES = 0, 1, 2  # modules that compute as in evaluation


def silence(modules: Iterable[nn.Module], which: int) -> None:
    """Let modules compute as in evaluation. `ModelState.restore` undoes it.

    Args:
        modules: all modules of the process.
        which: NOTHING, ALL_MODULES, or NOISY_MODULES with the modules inside of them.
    """
    if which == NOTHING:
        return
    modules = list(modules)
    chosen = modules if which == ALL_MODULES else [part for one in modules if is_noisy(one) for part in _inside(one)]
    for one in chosen:
        one.training = False


def _inside(module: nn.Module) -> Iterator[nn.Module]:
    return torch.nn.Module.modules(module)


def is_noisy(module: nn.Module) -> bool:
    """Return whether a module drops values or uses statistics of its batch now."""
    return module.training and (
        isinstance(module, nn.modules.dropout._DropoutNd | nn.modules.batchnorm._BatchNorm) or drops(module)
    )


def drops(module: nn.Module) -> bool:
    """Return whether a module drops values now.

    Example:
        >>> drops(nn.Dropout(0.1)), drops(nn.Dropout(0.1).eval()), drops(nn.LSTM(1, 1, 2, dropout=0.1))
        (True, False, True)
    """
    if not module.training:
        return False
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    return any("drop" in name and isinstance(one, float) and one > 0 for name, one in vars(module).items())


def has_batch_statistics(module: nn.Module) -> bool:
    """Return whether a module normalizes with the statistics of its batch now."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training


class Draws:
    """Random numbers that a forward pass draws outside of noisy modules.

    Attributes:
        are_outside: such numbers were drawn.
    """

    def __init__(self) -> None:
        self.are_outside = False
        self._depth = 0  # noisy modules around the current one
        self._state = random_states.current_checksums()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Watch a forward pass."""
        self._state, self._depth = random_states.current_checksums(), 0
        handles = [register_module_forward_pre_hook(self._enters), register_module_forward_hook(self._leaves)]
        try:
            with warnings.catch_warnings():
                # Compiled modules warn about hooks of all modules. They run eagerly here.
                warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global hooks")
                yield
        finally:
            for one in handles:
                one.remove()
        self._note()

    def _note(self) -> None:
        self.are_outside |= self._state != random_states.current_checksums()

    def _enters(self, module: nn.Module, _: Any) -> None:
        if is_noisy(module):
            if not self._depth:
                self._note()
            self._depth += 1

    def _leaves(self, module: nn.Module, _: Any, __: Any) -> None:
        if is_noisy(module):
            self._depth -= 1
            if not self._depth:
                self._state = random_states.current_checksums()
