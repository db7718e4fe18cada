"""Weights that `fully_shard` splits. It does not compare or copy them, so ranks must have the same ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ddp_notebook.rank.findings.tensor_checks import checksum, some_of
from ddp_notebook.stdlib import weakref

_MOST = 256  # parameters that wait for their first step
_MOST_OF_GROUP = 16


class _Weight:
    """A parameter that was sharded.

    Args:
        name: its name in the module.
        whole: checksum of some of its elements before it was sharded.
        shard: the shard of this rank.
    """

    def __init__(self, name: str, whole: int, shard: torch.Tensor) -> None:
        self.name, self._whole = name, whole
        self._shard, self._values = weakref.ref(shard), some_of(shard)

    @property
    def checksum(self) -> int | None:
        """Return the checksum of the whole parameter; None if the shard has changed since then."""
        shard = self._shard()
        if shard is None or shard.is_meta:
            return None
        values = some_of(shard)
        same = values.shape == self._values.shape and values.device == self._values.device
        return self._whole if same and torch.equal(values, self._values) else None


class ShardedWeights:
    """Weights that were sharded, until the first optimizer step after it."""

    def __init__(self) -> None:
        self._wholes: list[int | None] = []  # checksums of the next group
        self._waiting: list[tuple[Any, list[int], list[_Weight]]] = []  # module, ranks and weights of each group
        self._count = 0
        self._in_vain: tuple[int, list[int]] | None = None  # groups and models of the last look that found nothing

    def begins(self, parameters: Sequence[torch.Tensor]) -> None:
        """Look at whole parameters."""
        self._wholes = [_checksum(one) for one in parameters[:_MOST_OF_GROUP]]

    def made(self, module: torch.nn.Module, group: Any) -> None:
        """Keep the shards of a group of parameters."""
        wholes, self._wholes = self._wholes, []
        ranks = [int(rank) for rank in group.mesh_info.mesh.mesh.flatten().tolist()]
        is_split = getattr(group.mesh_info, "shard_mesh_size", 1) > 1  # `replicate` makes groups too
        if self._count >= _MOST:
            self._keep([one for one in self._waiting if one[0]() is not None])
        if not is_split or self._count >= _MOST:
            return
        names = {id(p): name for name, p in module.named_parameters()}
        weights = []
        for whole, one in zip(wholes, group.fsdp_params, strict=False):
            shard = one.sharded_param
            if whole is not None and not shard.is_meta:
                weights.append(_Weight(names.get(id(shard), ""), whole, shard))
        self._count += len(weights)
        self._waiting.append((weakref.ref(module), ranks, weights))

    def of(self, roots: Iterable[torch.nn.Module]) -> list[list[Any]]:
        """Return the groups of some models that were not returned before: ranks, and name and checksum of each weight.

        Call it before a step of an optimizer.
        """
        if not self._waiting:
            return []
        roots = list(roots)
        looked = len(self._waiting), [id(one) for one in roots]
        if looked == self._in_vain:
            return []
        names = {id(one): name for root in roots for name, one in root.named_modules()}
        found, waiting = [], []
        for reference, ranks, weights in self._waiting:
            module = reference()
            if module is not None and id(module) in names:
                prefix = names[id(module)]
                values = [[f"{prefix}.{one.name}" if prefix else one.name, one.checksum] for one in weights]
                found.append([ranks, values])
            elif module is not None:
                waiting.append((reference, ranks, weights))
        self._keep(waiting)
        self._in_vain = None if found else looked
        return found

    def _keep(self, waiting: list[tuple[Any, list[int], list[_Weight]]]) -> None:
        self._waiting = waiting
        self._count = sum(len(weights) for *_, weights in waiting)


def _checksum(parameter: torch.Tensor) -> int | None:
    if parameter.is_meta:
        return None
    return checksum([some_of(parameter).reshape(-1).cpu().repeat(2)])  # repeated, because it ignores single numbers
