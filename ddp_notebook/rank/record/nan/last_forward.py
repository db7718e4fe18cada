"""The last forward of each model: references to its inputs, its random state, and the gradients of its outputs.

Nothing is copied except the random state (5 kB). A tensor that was changed in place since then has another version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ddp_notebook.rank.hide_from_profiler import unseen
from ddp_notebook.rank.variables import random_states
from ddp_notebook.stdlib import functools


class KeptForward:
    """One forward with gradients.

    Args:
        module: the module that was called, without DDP.
        inputs, named: its arguments.
    """

    def __init__(self, module: torch.nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        self.module, self.inputs, self.named = module, inputs, dict(named)
        self.random_states = random_states.read()
        self.autocast = [_autocast(one) for one in ("cpu", "cuda") if one == "cpu" or torch.cuda.is_initialized()]
        self._versions = [_version(one) for one in self.tensors()]
        self._parameter_versions = sum(_version(one) for one in module.parameters())
        self.gradients: dict[int, tuple[torch.Tensor, int]] = {}  # gradients of outputs by index, with versions

    def tensors(self) -> Iterator[torch.Tensor]:
        """Return the tensors in its arguments."""
        return (one for one in tree_leaves((self.inputs, self.named)) if isinstance(one, torch.Tensor))

    def note_outputs(self, outputs: Any) -> None:
        """Keep references to the gradients of the outputs, once the backward has computed them."""
        for index, output in enumerate(outputs_of(outputs)):
            if (node := output.grad_fn) is not None:
                node.register_prehook(functools.partial(self._keep_gradient, index, output.output_nr))

    def _keep_gradient(self, index: int, at: int, gradients: Sequence[torch.Tensor | None]) -> None:
        if (gradient := gradients[at]) is not None:
            self.gradients[index] = gradient, _version(gradient)

    def changed(self) -> str:
        """Return why the forward cannot be repeated: what was changed in place since then; "" if nothing was."""
        if [_version(one) for one in self.tensors()] != self._versions:
            return "an input of its forward was changed in place afterwards"
        if sum(_version(one) for one in self.module.parameters()) != self._parameter_versions:
            return "parameters were changed after its forward"
        if any(_version(one) != version for one, version in self.gradients.values()):
            return "the gradient of its output was changed in place"
        return ""


def outputs_of(outputs: Any) -> list[torch.Tensor]:
    """Return the tensors with gradients in the result of a forward."""
    return [one for one in tree_leaves(outputs) if isinstance(one, torch.Tensor) and one.requires_grad]


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _autocast(device: str) -> tuple[str, bool, torch.dtype]:
    return device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


class LastForwards:
    """The last forward of each DDP model since the last optimizer step."""

    def __init__(self) -> None:
        self.kept: dict[int, KeptForward] = {}

    def around_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper for the forward of `DistributedDataParallel`."""

        def forward(model: Any, *inputs: Any, **named: Any) -> Any:
            if not torch.is_grad_enabled():
                return original(model, *inputs, **named)
            kept = unseen(KeptForward, model.module, inputs, named)
            self.kept[id(model)] = kept
            out = original(model, *inputs, **named)
            unseen(kept.note_outputs, out)
            return out

        forward._torchdynamo_disable = True  # type: ignore[attr-defined]  # torch.compile calls it without tracing it
        return forward
