"""Tensors of the models that differ between ranks, and the values of rank 0 for runs with common ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ddp_notebook.rank.verify.coverage import Coverage, has_values
from ddp_notebook.rank.verify.local_model import FullParameters
from ddp_notebook.rank.verify.ranks import Ranks
from ddp_notebook.stdlib import hashlib

Common = list[tuple[torch.Tensor, torch.Tensor]]  # tensors, and their values on rank 0


def _sent_buffers(model: DistributedDataParallel) -> list[torch.Tensor]:
    """Return the buffers that a DDP model sends from rank 0 in its next forward pass.

    Source: `DistributedDataParallel.will_sync_module_buffers`. It sends none if there were none in the pass before,
    such as buffers that the first forward pass has made.
    """
    if not model.broadcast_buffers or not model.modules_buffers:
        return []
    return [one for name, one in model.module.named_buffers() if name not in model.parameters_to_ignore]


def checksum(tensor: torch.Tensor) -> str:
    """Return a hash of the values of a tensor."""
    data: Any = tensor.detach().cpu().contiguous()
    return hashlib.blake2b(data.reshape(-1).view(torch.uint8).numpy(), digest_size=16).hexdigest()


class Copies:
    """Comparison of the tensors that each rank holds. All ranks must make it at the same time.

    Args:
        ranks: the ranks.
        coverage: parameters by name.
        full: complete parameters of sharded models.

    Attributes:
        broadcast: buffers that DDP sends from rank 0 in each forward pass, if they differ.
        common: all tensors that differ, and have one shape on all ranks.
        weights: relative difference to rank 0, by parameter and rank. Infinity: the shape differs.
        largest: largest absolute difference of an element, by parameter.
        shards: names of sharded parameters in `weights`, whose copies differ.
        own_buffers: other buffers that differ, by name.
    """

    def __init__(self, ranks: Ranks, coverage: Coverage, full: FullParameters) -> None:
        self._ranks = ranks
        self._coverage = coverage
        sent = [one for model in coverage.ddp for one in _sent_buffers(model)]
        self.broadcast = self._with_first(sent)
        buffers = coverage.buffers()
        of_ddp = {id(one) for one in sent}
        own = {name: one for name, one in buffers.items() if id(one) not in of_ddp}
        # FSDP keeps other statistics of BatchNorm on each rank.
        others = self._with_first(list(own.values()))
        differ = {id(one) for one, first in others if not torch.equal(one, first)}
        names = set[str]().union(*ranks.all({name for name, one in own.items() if id(one) in differ}))
        self.own_buffers = {name: own[name] for name in sorted(names) if name in own}
        self.common: Common = [*self.broadcast, *others]
        self.largest: dict[str, float] = {}
        self.weights = self._other_weights(full)
        copies = self._other_shards()
        self.shards = sorted(copies)
        self.weights |= copies

    def _other_weights(self, full: FullParameters) -> dict[str, dict[int, float]]:
        tensors = {name: one for name, one in self._coverage.tensors().items() if not isinstance(one, DTensor)}
        tensors = dict(sorted((tensors | full.flat).items()))
        marks = self._ranks.attempt(
            lambda: {name: (tuple(one.shape), str(one.dtype), checksum(one)) for name, one in tensors.items()}
        )
        all_marks = self._ranks.all(marks)
        found: dict[str, dict[int, float]] = {}
        for name in all_marks[0]:
            of_ranks = [marks.get(name) for marks in all_marks]
            others = [rank for rank, mark in enumerate(of_ranks) if mark is not None and mark != of_ranks[0]]
            if not others:
                continue
            if any(mark is None or mark[:2] != of_ranks[0][:2] for mark in of_ranks):
                found[name] = dict.fromkeys(others, float("inf"))
                continue
            first = self._ranks.of_first(tensors[name])
            gap = (tensors[name].detach() - first).double()
            by_rank = self._ranks.all(
                (float(gap.norm() / first.double().norm().clamp_min(1e-30)), float(gap.abs().max()))
            )
            found[name] = {rank: by_rank[rank][0] for rank in others}
            self.largest[name] = max(by_rank[rank][1] for rank in others)
            if name in full.flat:
                full.set_first(name, first)
            else:
                self.common.append((tensors[name], first))
        return found

    def _with_first(self, buffers: Sequence[torch.Tensor]) -> Common:
        """Return buffers with their values on rank 0, or nothing if they are equal on all ranks."""
        buffers = list({id(one): one for one in buffers if has_values(one)}.values())
        shapes = self._ranks.all([(tuple(one.shape), str(one.dtype)) for one in buffers])
        marks = self._ranks.all(self._ranks.attempt(lambda: [checksum(one) for one in buffers]))
        if any(one != shapes[0] for one in shapes) or all(one == marks[0] for one in marks):
            return []
        return [(one, self._ranks.of_first(one)) for one in buffers]

    def _other_shards(self) -> dict[str, dict[int, float]]:
        """Return the sharded parameters whose copies differ, such as the replicas of HSDP, like `weights`."""
        own: dict[str, tuple[list[int], str]] = {}
        shards: dict[str, torch.Tensor] = {}
        for name, one in sorted(self._coverage.tensors().items()):
            if not isinstance(one, DTensor) or (place := one.device_mesh.get_coordinate()) is None:
                continue
            replicated = [placement.is_replicate() for placement in one.placements]
            if any(replicated):
                shards[name] = one.to_local().detach()
                shard = [at for at, is_copy in zip(place, replicated, strict=True) if not is_copy]
                own[name] = (shard, checksum(shards[name]))
        by_rank = self._ranks.all(own)
        found: dict[str, dict[int, float]] = {}
        for name in sorted({name for of_rank in by_rank for name in of_rank}):
            firsts: dict[tuple[int, ...], int] = {}  # first rank with each shard
            others: dict[int, int] = {}  # ranks with another copy than the first one
            for rank, of_rank in enumerate(by_rank):
                if name in of_rank:
                    first = firsts.setdefault(tuple(of_rank[name][0]), rank)
                    if of_rank[name] != by_rank[first][name]:
                        others[rank] = first
            if others:
                values = self._ranks.all(shards[name].cpu().double() if name in shards else None)
                gaps = {rank: values[rank] - values[first] for rank, first in others.items()}
                found[name] = {
                    rank: float(gap.norm() / values[others[rank]].norm().clamp_min(1e-30)) for rank, gap in gaps.items()
                }
                self.largest[name] = max(float(gap.abs().max()) for gap in gaps.values())
        return found

    def options(self, namespace: Mapping[str, Any]) -> list[tuple[str, str, list[float]]]:
        """Return the options of optimizers that differ between ranks: variable, option and the values of the ranks.

        Only optimizers count whose parameters belong to a model of the step.
        """
        own = {id(one) for one in self._coverage.parameters().values()}
        found: dict[tuple[str, int, str], float] = {}
        for name, value in sorted(namespace.items()):
            if not isinstance(value, torch.optim.Optimizer) or name.startswith("_"):
                continue
            for at, group in enumerate(value.param_groups):
                if any(id(one) in own for one in group["params"]):
                    numbers = {key: one for key, one in group.items() if isinstance(one, float)}
                    found |= {(name, at, key): one for key, one in numbers.items()}
        by_rank = self._ranks.all(found)
        return [
            (key[0], key[2], values)
            for key in by_rank[0]
            if all(key in one for one in by_rank) and len(set(values := [one[key] for one in by_rank])) > 1
        ]
