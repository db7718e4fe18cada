"""Make the models of a rank compute without communication, as on one process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ddp_notebook.rank.verify.coverage import Coverage, param_groups
from ddp_notebook.rank.verify.fsdp1 import set_parameter

_OF_PARALLELISM = ("torch.distributed.tensor", "torch.distributed.fsdp")  # modules with hooks that communicate
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


def reshard(modules: Iterable[torch.nn.Module]) -> None:
    """Free the complete parameters that a forward pass without backward has left in FSDP2 models."""
    for module in modules:
        if isinstance(module, FSDPModule):
            module.reshard()


class FullParameters:
    """Complete parameters of models that are sharded over ranks. All ranks must make it at the same time.

    Args:
        modules: all modules of the process.
        coverage: the parameters of the step by name, in the same order on each rank.

    Attributes:
        flat: complete parameters of models of `FullyShardedDataParallel`, by name.
    """

    def __init__(self, modules: Iterable[torch.nn.Module], coverage: Coverage) -> None:
        self._modules = list(modules)
        types = _types_in_forward(coverage)
        self._full: dict[int, torch.nn.Parameter] = {}
        for _, one in sorted(coverage.tensors().items()):
            if isinstance(one, DTensor):
                full = one.full_tensor().detach().clone().to(types.get(id(one), one.dtype))
                self._full[id(one)] = torch.nn.Parameter(full, requires_grad=one.requires_grad)
        self.flat = coverage.flat.parameters()
        self._models = coverage.flat
        self._full |= {id(one): one for one in self.flat.values()}
        self._first: dict[int, torch.Tensor] = {}  # other values of rank 0
        self._values = {key: one.data for key, one in self._full.items()}

    @property
    def are_needed(self) -> bool:
        """Return whether a parameter is sharded."""
        return bool(self._full)

    def has(self, parameter: torch.Tensor) -> bool:
        """Return whether this is a complete parameter in place of a sharded one."""
        return any(one is parameter for one in self._full.values())

    def set_first(self, name: str, of_first: torch.Tensor) -> None:
        """Set the values of rank 0 for `put` of a parameter in `flat`."""
        self._first[id(self.flat[name])] = of_first

    def put(self, *, common: bool = False) -> None:
        """Replace sharded parameters by complete ones, and remove the hooks that communicate.

        Args:
            common: use the values of rank 0.

        `ModelState.restore` undoes it.
        """
        for key, full in self._full.items():
            full.data = self._first.get(key, self._values[key]) if common else self._values[key]
        self._models.put(self.flat)
        for module in self._modules:
            for name, one in list(module._parameters.items()):
                if one is not None and (complete := self._full.get(id(one))) is not None:
                    set_parameter(module, name, complete)
            for table in _HOOKS:
                hooks = getattr(module, table)
                for key in [key for key, hook in hooks.items() if _module_of(hook).startswith(_OF_PARALLELISM)]:
                    del hooks[key]
            if isinstance(module, FSDPModule):
                _cast_as_fsdp_does(module)


def _types_in_forward(coverage: Coverage) -> dict[int, torch.dtype]:
    """Return the type of FSDP2's mixed precision for each sharded parameter, by its id."""
    found: dict[int, torch.dtype] = {}
    for module in coverage.fsdp2:
        for group in param_groups(module):
            for one in group.fsdp_params:
                if one.mp_policy.param_dtype is not None:
                    found[id(one.sharded_param)] = one.mp_policy.param_dtype
    return found


def _module_of(hook: Any) -> str:
    function = getattr(hook, "__func__", hook)
    return str(getattr(function, "__module__", ""))


def _cast_as_fsdp_does(module: FSDPModule) -> None:
    """Cast inputs and outputs of a module as its mixed precision policy requires."""
    policy = module._get_fsdp_state()._mp_policy
    if policy.cast_forward_inputs and policy.param_dtype is not None:

        def cast_inputs(_: Any, args: Any, kwargs: Any) -> Any:
            return _cast(args, policy.param_dtype), _cast(kwargs, policy.param_dtype)

        module.register_forward_pre_hook(cast_inputs, with_kwargs=True)  # type: ignore[attr-defined]
    if policy.output_dtype is not None:
        module.register_forward_hook(lambda _, __, out: _cast(out, policy.output_dtype))  # type: ignore[attr-defined]


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if type(value) in (tuple, list):
        return type(value)(_cast(one, dtype) for one in value)
    if type(value) is dict:
        return {key: _cast(one, dtype) for key, one in value.items()}
    return value


def stop_sync(coverage: Coverage) -> None:
    """Keep DDP models from communicating. `ModelState.restore` restores their flags."""
    for model in coverage.ddp:
        model.require_backward_grad_sync = model.require_forward_param_sync = False


class SyncFlags:
    """The flags of wrappers that let a backward pass average gradients.

    Args:
        coverage: has the wrappers.
    """

    def __init__(self, coverage: Coverage) -> None:
        self._ddp = [(model, model.require_backward_grad_sync) for model in coverage.ddp]
        groups = [group for module in coverage.fsdp2 for group in param_groups(module)]
        self._fsdp = [(group, group.reduce_grads) for group in groups]
        self._fsdp1 = [(wrapper, bool(wrapper._sync_gradients)) for wrapper in coverage.fsdp1]

    def set(self, is_last: bool) -> None:
        """Average gradients only in the last micro-step, as `no_sync` does. A flag that was off stays off."""
        for model, syncs in self._ddp:
            model.require_backward_grad_sync = syncs and is_last
        for group, reduces in self._fsdp:
            group.reduce_grads = reduces and is_last
        for wrapper, was_on in self._fsdp1:
            vars(wrapper)["_sync_gradients"] = was_on and is_last

    @property
    def are_off(self) -> bool:
        """Return whether a wrapper averages nothing, because of `no_sync` or `set_requires_gradient_sync(False)`."""
        return not all(on for _, on in (*self._ddp, *self._fsdp, *self._fsdp1))
