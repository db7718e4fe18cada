"""Save and restore models, gradients, random states and variables of a rank."""

from __future__ import annotations

from collections.abc import Collection, MutableMapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ddp_notebook.rank.variables.snapshot import Snapshot
from ddp_notebook.stdlib import gc

_FLAGS = ("training", "require_backward_grad_sync", "require_forward_param_sync")
_ENQUEUED = "_static_graph_delay_allreduce_enqueued"  # only of DDP models with a static graph


class ModelState:
    """State of this rank at one moment.

    It has the state that the user's variables and all modules of the process reach, see `Snapshot`: parameters,
    buffers, gradients, hooks, containers, objects of the user's classes, and random states.

    Args:
        namespace: the user's variables.
        hidden: names that do not belong to the user.
        modules: the modules whose state is saved; None: all modules of the process.

    Attributes:
        left: reasons for objects whose state cannot be saved, by their place: "batches": "a generator".

    Example:
        >>> model = torch.nn.Linear(1, 1)
        >>> state = ModelState({"model": model})
        >>> state.take()
        >>> before = model.weight.item()
        >>> _ = model.weight.data.zero_()
        >>> state.restore()
        >>> model.weight.item() == before
        True
    """

    def __init__(
        self,
        namespace: MutableMapping[str, Any],
        hidden: Collection[str] = (),
        modules: Sequence[torch.nn.Module] | None = None,
    ) -> None:
        self._namespace = namespace
        self.modules = modules = all_modules() if modules is None else list(modules)
        self._models = [one for one in modules if isinstance(one, DistributedDataParallel)]
        # Other attributes of DDP models describe the state of their reducers, which a step cannot undo.
        self._snapshot = Snapshot(namespace, hidden, roots=modules, reducers=False)
        self.left = self._snapshot.left
        self.nbytes = self._snapshot.nbytes
        self.is_in_step = False  # the ranks compute a step together, whose collectives may be interrupted

    def take(self) -> None:
        """Copy the state.

        Raises:
            MemoryError: there is not enough memory.
        """
        self._flags = [
            {name: vars(model)[name] for name in (*_FLAGS, _ENQUEUED) if name in vars(model)} for model in self._models
        ]
        tensors: dict[int, torch.Tensor] = {
            id(one): one for module in self.modules for one in module.parameters(recurse=False)
        }
        tensors |= {id(one): one for one in self._namespace.values() if isinstance(one, torch.Tensor)}
        self._hooks = [(one, dict(one._backward_hooks or {})) for one in tensors.values()]
        self._snapshot.take()

    def reaches(self, tensor: torch.Tensor) -> bool:
        """Return whether the saved state has this tensor."""
        return self._snapshot.reaches(tensor)

    def restore(self) -> None:
        """Restore the state. A second call has no further effect."""
        if self.is_in_step:
            for model in self._models:
                model.reducer._reset_state()  # its backward pass did not end
        self._snapshot.put_back()
        for model, flags in zip(self._models, self._flags, strict=True):
            vars(model).update(flags)
        for tensor, hooks in self._hooks:
            if tensor._backward_hooks is not None:
                tensor._backward_hooks.clear()
                tensor._backward_hooks.update(hooks)
        self.is_in_step = False


def all_modules() -> list[torch.nn.Module]:
    """Return all modules of the process, whether a variable refers to them or not."""
    return [one for one in gc.get_objects() if issubclass(type(one), torch.nn.Module)]
