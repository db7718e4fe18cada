"""The last forwards of each model: references to their inputs, their random state, and the gradients of their outputs.

A model is a module that no other module calls. Nothing is copied except the random state (8 kB). A tensor that was
changed in place since then has another version.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from ddp_notebook.rank.hide_from_profiler import unseen
from ddp_notebook.rank.record.nan.gradients import SMALL, all_finite, local_part
from ddp_notebook.rank.record.training.wrapping import traced_as
from ddp_notebook.rank.variables import random_states
from ddp_notebook.stdlib import functools, threading

_MOST_OF_MODEL = 4  # forwards of one model that are kept between two backwards
_MOST_MODELS = 64


class KeptForward:
    """One forward with gradients.

    Args:
        module: the module that was called, without DDP.
        inputs, named: its arguments.
        number: number of the forward in the order of calls.
    """

    def __init__(
        self, module: torch.nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any], number: int = 0
    ) -> None:
        self.module, self.inputs, self.named, self.number = module, inputs, dict(named), number
        self.random_states = random_states.read()
        self.autocast = [_autocast(one) for one in ("cpu", "cuda") if one == "cpu" or torch.cuda.is_initialized()]
        self.parameters = list(module.parameters())
        self._versions = [_version(one) for one in self.tensors()]
        self._parameter_versions = sum(map(_version, self.parameters))
        self.gradients: dict[int, tuple[torch.Tensor, int]] = {}  # gradients of outputs by index, with versions
        self._sums: list[torch.Tensor] = []  # of the outputs

    def tensors(self) -> Iterator[torch.Tensor]:
        """Return the tensors in its arguments."""
        return (one for one in tree_leaves((self.inputs, self.named)) if isinstance(one, torch.Tensor))

    def note_outputs(self, outputs: Any) -> None:
        """Keep sums of the outputs, and references to their gradients once the backward has computed them."""
        for index, output in enumerate(outputs_of(outputs)):
            self._sums.append(_sum(output))
            if (node := output.grad_fn) is not None:
                node.register_prehook(functools.partial(self._keep_gradient, index, output.output_nr))

    def _keep_gradient(self, index: int, at: int, gradients: Sequence[torch.Tensor | None]) -> None:
        if (gradient := gradients[at]) is not None:
            self.gradients[index] = gradient, _version(gradient)

    def changed(self) -> str:
        """Return why the forward cannot be repeated: what was changed in place since then; "" if nothing was."""
        if [_version(one) for one in self.tensors()] != self._versions:
            return "an input of its forward was changed in place afterwards"
        if sum(map(_version, self.parameters)) != self._parameter_versions:
            return "parameters were changed after its forward"
        if any(_version(one) != version for one, version in self.gradients.values()):
            return "the gradient of its output was changed in place"
        return ""

    def had_finite_outputs(self) -> bool:
        """Return whether the outputs were finite. A sum that overflows counts as infinite."""
        return all(bool(one.isfinite()) for one in self._sums)

    def has_sums_of(self, outputs: Sequence[torch.Tensor]) -> bool:
        """Return whether the sums of these outputs are finite, infinite or NaN where those of the forward are."""
        sums = [_sum(one) for one in outputs]
        return [_kind(one) for one in sums] == [_kind(one) for one in self._sums]

    def hides_gradients(self) -> bool:
        """Return whether FSDP keeps the gradients of a backward that does not average them."""
        return all(one.grad is None for one in self.parameters) and any(
            hasattr(one, "device_mesh") for one in self.parameters
        )

    def has_finite_gradients(self) -> bool:
        """Return whether the gradients that the parameters have now are finite."""
        return all_finite([local_part(one.grad) for one in self.parameters if one.grad is not None])


def outputs_of(outputs: Any) -> list[torch.Tensor]:
    """Return the tensors with gradients in the result of a forward."""
    return [one for one in tree_leaves(outputs) if isinstance(one, torch.Tensor) and one.requires_grad]


def _sum(output: torch.Tensor) -> torch.Tensor:
    values = local_part(output.detach())
    return values.sum(dtype=torch.float32 if values.dtype in SMALL else None)


def _kind(number: torch.Tensor) -> tuple[bool, bool]:
    return bool(number.isfinite()), bool(number.isnan())


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _autocast(device: str) -> tuple[str, bool, torch.dtype]:
    return device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def without_wrappers(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside DDP and torch.compile.

    Example:
        >>> layer = torch.nn.Linear(1, 1)
        >>> without_wrappers(layer) is layer
        True
    """
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := model._modules.get("_orig_mod"), torch.nn.Module):
            model = inner
        else:
            return model


class LastForwards:
    """The forwards of each model since the last optimizer step.

    Args:
        note_gradients: gets whether the gradients were finite after a backward that another forward of its model
            follows, in gradient accumulation.

    Attributes:
        is_on: forwards are kept.
    """

    def __init__(self, note_gradients: Callable[[bool], None] = lambda are_finite: None) -> None:
        self.is_on = True
        self._note_gradients = note_gradients
        self._kept: dict[int, list[KeptForward]] = {}  # keys are ids of modules
        self._count = 0
        self._inside: set[int] = set()  # threads that run a forward

    def forget(self, stepped: Collection[torch.Tensor] | None = None) -> None:
        """Forget forwards.

        Args:
            stepped: parameters that an optimizer changes now. Forwards of models without these are kept: a step of a
                GAN's discriminator comes between the forward and the backward of its generator. None: forget all.
        """
        if stepped is None:
            self._kept.clear()
            return
        ids = {id(one) for one in stepped}
        for key, kept in list(self._kept.items()):
            trained = [id(one) for one in kept[0].parameters if one.requires_grad]
            if not trained or not ids.isdisjoint(trained):
                del self._kept[key]

    def in_order(self) -> list[KeptForward]:
        """Return the forwards in the order of their calls."""
        return sorted((one for kept in self._kept.values() for one in kept), key=lambda one: one.number)

    def around_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper for `torch.nn.Module.__call__`."""
        inside = self._inside

        def __call__(module: torch.nn.Module, *inputs: Any, **named: Any) -> Any:
            thread = threading.get_ident()
            # In a backward, a checkpoint repeats a part of a forward.
            if thread in inside or not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
                return original(module, *inputs, **named)
            inside.add(thread)
            try:
                kept = unseen(self._keep, module, inputs, named)
                out = original(module, *inputs, **named)
            finally:
                inside.discard(thread)
            if kept is not None:
                unseen(kept.note_outputs, out)
            return out

        return traced_as(original, __call__)

    def _keep(self, model: torch.nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> KeptForward | None:
        """Keep a forward that starts. Return None if it is not kept."""
        if not self.is_on:
            return None
        try:
            module = without_wrappers(model)
            kept = self._kept.get(id(module), [])
            if any(one.gradients for one in kept):  # a backward has followed, in gradient accumulation
                if kept[0].hides_gradients():
                    kept = kept[1 - _MOST_OF_MODEL :]
                else:
                    self._note_gradients(are_finite := kept[0].has_finite_gradients())
                    if not are_finite:
                        return None  # the kept forward made the first bad value
                    kept = []
            if len(kept) >= _MOST_OF_MODEL or (not kept and len(self._kept) >= _MOST_MODELS):
                return None
            self._count += 1
            new = KeptForward(module, inputs, named, self._count)
            kept.append(new)
            self._kept[id(module)] = kept
            return new
        except (RuntimeError, AttributeError, TypeError):  # a tensor of another library; the forward must continue
            return None
