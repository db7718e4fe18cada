"""Complete parameters and gradients of models of `FullyShardedDataParallel`, which stores them in vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

_FLAT = "_flat_param"
_STRATEGIES = (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD)


def _gradient_of(handle: Any) -> torch.Tensor | None:
    """Return a copy of the gradient of this rank's shard, or of the complete vector."""
    flat = handle.flat_param
    if flat.grad is not None:
        return flat.grad.detach().clone()
    parts = [one.grad for one in flat._params or ()]
    if handle.uses_sharded_strategy or not parts or any(one is None for one in parts):
        return None
    pieces, rest = [], iter(parts)
    for size, is_padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
        pieces.append(flat.new_zeros(size) if is_padding else next(rest).detach().reshape(-1))
    return torch.cat(pieces)


class FlatModels:
    """Models of `FullyShardedDataParallel` that take part in a step.

    Args:
        models: all wrappers, nested ones too, in the same order on each rank.
        name_of: returns the name of a parameter from its module and its name there.
    """

    def __init__(
        self, models: Iterable[FullyShardedDataParallel], name_of: Callable[[torch.nn.Module, str], str]
    ) -> None:
        self._models = list(models)
        self._name_of = name_of
        self._gradients: list[torch.Tensor | None] = []
        self._handles = [one._handle for one in self._models if one._handle is not None]

    def obstacle(self) -> str:
        """Return a clause if a model cannot be compared, else ""."""
        for one in self._models:
            if one.sharding_strategy not in _STRATEGIES:
                name = one.sharding_strategy.name
                return f"FullyShardedDataParallel with {name} is not supported: use FULL_SHARD, NO_SHARD or fully_shard"
            if any(getattr(one.mixed_precision, name) for name in ("param_dtype", "reduce_dtype", "buffer_dtype")):
                return "FullyShardedDataParallel with mixed_precision is not supported: use fully_shard"
            if one.cpu_offload.offload_params:
                return "FullyShardedDataParallel with cpu_offload is not supported: use fully_shard"
        return ""

    def managed(self) -> set[int]:
        """Return the ids of the vectors, and of their parts that are parameters of modules."""
        vectors = [one.flat_param for one in self._handles]
        return {id(one) for one in vectors} | {id(part) for one in vectors for part in one._params or ()}

    def clear_gradients(self) -> None:
        """Let all vectors and their parts have no gradient."""
        for handle in self._handles:
            for one in (handle.flat_param, *(handle.flat_param._params or ())):
                one.grad = None

    def take_gradients(self) -> None:
        """Store copies of the gradients of the vectors for `complete_gradients`, and clear them."""
        self._gradients = [_gradient_of(one) for one in self._handles]
        self.clear_gradients()

    def complete_gradients(self) -> dict[str, torch.Tensor]:
        """Return the complete gradients after `take_gradients`, by name. All ranks call it."""
        found: dict[str, torch.Tensor] = {}
        for number, own in enumerate(self._gradients):
            has_own: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(has_own, None if own is None else own.numel())
            if own is not None and len(set(has_own)) == 1:
                found |= dict(self.complete(number, own))
        self._gradients = []
        return found

    def ranks(self) -> list[int]:
        """Return the ranks over which the gradients are averaged."""
        return list(dist.get_process_group_ranks(self._models[0].process_group))

    def complete(self, number: int, own: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the names and the complete tensors of a vector, from each rank's shard. All ranks call it.

        Args:
            number: number of the vector.
            own: this rank's shard, or the complete vector.
        """
        handle = self._handles[number]
        flat, vector = handle.flat_param, own.detach().reshape(-1)
        if handle.uses_sharded_strategy and vector.numel() == flat._sharded_size.numel():
            vectors = [torch.empty_like(vector) for _ in range(dist.get_world_size(handle.process_group))]
            dist.all_gather(vectors, vector.contiguous(), handle.process_group)
            vector = torch.cat(vectors)
        at, pieces = 0, []
        for size, is_padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
            if not is_padding:
                pieces.append(vector[at : at + size])
            at += size
        for (name, module, _), shape, piece in zip(flat._param_infos, flat._shapes, pieces, strict=True):
            yield self._name_of(module, name), piece.reshape(shape).clone()

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return complete copies of all parameters by name. All ranks call it."""
        found: dict[str, torch.nn.Parameter] = {}
        for number, handle in enumerate(self._handles):
            flat = handle.flat_param
            own = getattr(flat, "_local_shard", flat) if handle.uses_sharded_strategy else flat
            needs = [one.requires_grad for one in flat._params or ()]
            for at, (name, one) in enumerate(self.complete(number, own)):
                found[name] = torch.nn.Parameter(one, requires_grad=needs[at] if needs else flat.requires_grad)
        return found

    def put(self, parameters: dict[str, torch.nn.Parameter]) -> None:
        """Replace the parts of vectors by complete parameters, and let wrappers call their module alone."""
        for model in self._models:
            vars(model)["forward"] = model._fsdp_wrapped_module
            for module in torch.nn.Module.modules(model):
                module._parameters.pop(_FLAT, None)
        for handle in self._handles:
            flat = handle.flat_param
            for name, module, _ in flat._param_infos:
                _set(module, name, parameters[self._name_of(module, name)])
            for name, module, _, first_name, first, _ in flat._shared_param_infos:
                _set(module, name, parameters[self._name_of(first, first_name)])


def _set(module: torch.nn.Module, name: str, parameter: Any) -> None:
    vars(module).pop(name, None)  # a part of the vector
    set_parameter(module, name, parameter)


def set_parameter(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> None:
    """Set a parameter of a module. Recurrent layers keep a list of theirs."""
    if type(module).__setattr__ is torch.nn.Module.__setattr__:
        module._parameters[name] = parameter
    else:
        setattr(module, name, parameter)
