"""Samplers of data that share it out among the ranks: they go over as many as there are now."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler


def resize(before: tuple[int, int], now: tuple[int, int], namespace: Mapping[str, Any]) -> list[str]:
    """Let the samplers of this process go over other ranks. Their epoch, seed and order stay.

    Args:
        before: this rank and how many there were, as in the samplers; in a new rank those of the rank that they are
            copies of.
        now: this rank and how many there are.
        namespace: the user's variables, which give loaders their names.

    Returns:
        What the user has to know, the same on all ranks.
    """
    notes = []
    resized: list[DistributedSampler[Any]] = []
    left = 0
    for sampler in [one for one in gc.get_objects() if issubclass(type(one), DistributedSampler)]:
        if (sampler.rank, sampler.num_replicas) == before:
            _share_anew(sampler, *now)
            resized.append(sampler)
        elif sampler.num_replicas not in (now[1], 1):
            left += 1
    if before[1] == now[1]:  # only the numbers of ranks have changed
        return []
    for name, loader in namespace.items():
        if issubclass(type(loader), DataLoader) and any(_sampler_of(loader) is one for one in resized):
            note = f"{name} goes over {_ranks(now[1])} now"
            if batch := loader.batch_size or getattr(loader.batch_sampler, "batch_size", 0):
                note += f": with batches of {batch} a step has {batch * now[1]} samples, and had {batch * before[1]}"
            notes.append(note)
    if resized and not notes:
        notes.append(f"{_samplers(len(resized))} over {_ranks(now[1])} now")
    if left:
        notes.append(f"{_samplers(left)} over other ranks than all there were: make new ones")
    return notes


def _share_anew(sampler: DistributedSampler[Any], rank: int, world_size: int) -> None:
    epoch = sampler.epoch
    DistributedSampler.__init__(  # of a subclass too: what it has besides stays
        sampler,
        sampler.dataset,
        num_replicas=world_size,
        rank=rank,
        shuffle=sampler.shuffle,
        seed=sampler.seed,
        drop_last=sampler.drop_last,
    )
    sampler.epoch = epoch


def _sampler_of(loader: DataLoader[Any]) -> Any:
    inner = getattr(loader.batch_sampler, "sampler", None)
    return inner if issubclass(type(inner), DistributedSampler) else loader.sampler


def _samplers(count: int) -> str:
    return "1 DistributedSampler goes" if count == 1 else f"{count} DistributedSamplers go"


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
