"""Checksums of the tensors of a training cell: batches, local gradients, averaged gradients, and parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.utils.weak import WeakTensorKeyDictionary

from ddp_notebook.rank.hide_from_profiler import unseen
from ddp_notebook.stdlib import contextlib, hashlib

KINDS = ("batch", "local gradient", "gradient", "parameter")  # in the order of a step
_MOST = 2_000_000  # observed tensors of a run
Key = tuple[int, str, str, int]  # step, kind, name, count of this name in the step


class Observation:
    """The tensors of one run of a cell. Make it when the cell starts, and `end` it after the cell."""

    def __init__(self) -> None:
        self.checksums: dict[Key, str] = {}
        self._step = 0
        self._depth = 0
        self._names: Any = WeakTensorKeyDictionary()
        self._counts: dict[tuple[str, str], int] = {}
        self._hooks: list[Any] = [
            modules.register_module_forward_pre_hook(self._forward_begins),
            modules.register_module_forward_hook(self._forward_ends, always_call=True),
            optimizers.register_optimizer_step_pre_hook(self._step_begins),
            optimizers.register_optimizer_step_post_hook(self._step_ends),
        ]

    def end(self) -> None:
        """Remove all hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _put(self, kind: str, name: str, tensor: torch.Tensor) -> None:
        if len(self.checksums) >= _MOST:
            return
        count = self._counts[kind, name] = self._counts.get((kind, name), 0) + 1
        with contextlib.suppress(Exception):  # a tensor whose bytes cannot be read
            self.checksums[self._step, kind, name, count] = unseen(_checksum, tensor)

    def _forward_begins(self, module: torch.nn.Module, args: Any) -> None:
        self._depth += 1
        if self._depth > 1 or torch.compiler.is_compiling():
            return
        kind = type(module).__name__
        for number, tensor in enumerate(_tensors(args)):
            self._put("batch", f"input {number} of {kind}", tensor)
        for name, parameter in module.named_parameters():
            if parameter not in self._names and not torch.nn.parameter.is_lazy(parameter):
                self._names[parameter] = name
                if parameter.requires_grad:
                    self._hooks.append(parameter.register_hook(self._gradient_hook(name)))

    def _forward_ends(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        self._depth = max(0, self._depth - 1)

    def _gradient_hook(self, name: str) -> Any:
        def hook(gradient: torch.Tensor) -> None:
            self._put("local gradient", name, gradient)

        return hook

    def _step_begins(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._depth = 0
        for name, parameter in self._parameters(optimizer):
            if parameter.grad is not None:
                self._put("gradient", name, parameter.grad)

    def _step_ends(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for name, parameter in self._parameters(optimizer):
            self._put("parameter", name, parameter)
        self._step += 1
        self._counts.clear()

    def _parameters(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
        kind = type(optimizer).__name__
        for number, group in enumerate(optimizer.param_groups):
            for at, parameter in enumerate(group["params"]):
                yield self._names.get(parameter, f"parameter {at} in group {number} of {kind}"), parameter


def first_difference(before: Observation, after: Observation) -> dict[str, Any]:
    """Return counts of the compared tensors by kind, the number of steps, and the first difference as JSON values.

    "first" is None, or the step, the kind, the name and the two checksums. A checksum is "" if a run lacks the tensor.
    """
    counts = dict.fromkeys(KINDS, 0)
    first: list[Any] | None = None
    keys = [*before.checksums, *(key for key in after.checksums if key not in before.checksums)]
    for key in sorted(keys, key=lambda key: key[0]):  # stable: in the order of a step
        one, other = before.checksums.get(key, ""), after.checksums.get(key, "")
        counts[key[1]] += 1
        if one != other and first is None:
            first = [key[0], key[1], key[2], one, other]
    return {"counts": counts, "steps": max((key[0] for key in keys), default=-1) + 1, "first": first}


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors(one)


def _checksum(tensor: torch.Tensor) -> str:
    local = getattr(tensor, "_local_tensor", tensor).detach()
    octets = local.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return hashlib.blake2b(octets, digest_size=8).hexdigest()
