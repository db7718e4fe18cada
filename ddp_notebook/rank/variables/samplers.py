"""Adapt data samplers to the current number of ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler

from ddp_notebook.messages.resize_messages import SamplerChange
from ddp_notebook.stdlib import gc


def there() -> list[DistributedSampler[Any]]:
    """Return all distributed samplers of this process."""
    return [one for one in gc.get_objects() if issubclass(type(one), DistributedSampler)]


def resize(
    before: tuple[int, int],
    now: tuple[int, int],
    namespace: Mapping[str, Any],
    but: Collection[DistributedSampler[Any]] = (),
) -> list[SamplerChange]:
    """Adapt the samplers of this process to new ranks. Their epoch, seed and order stay.

    Args:
        before: previous rank and number of ranks, as in the samplers. In a new rank, those of the rank that they are
            copied from.
        now: current rank and number of ranks.
        namespace: variables of the user, for the names of loaders.
        but: samplers to skip.

    Returns:
        The changes to report to the user, the same on all ranks.
    """
    changes = []
    resized: list[DistributedSampler[Any]] = []
    left = 0
    for sampler in there():
        if any(sampler is one for one in but):
            continue
        if (sampler.rank, sampler.num_replicas) == before:
            _share_anew(sampler, *now)
            resized.append(sampler)
        elif sampler.num_replicas not in (now[1], 1):
            left += 1
    of_some = [SamplerChange(count=left)] if left else []
    if before[1] == now[1]:  # only rank numbers have changed
        return of_some
    told: list[Any] = []
    variables = sorted(namespace.items(), key=lambda item: issubclass(type(item[1]), DistributedSampler))
    for name, value in variables:  # loaders before the samplers that they may contain
        sampler = _sampler_of(value)
        if any(sampler is one for one in resized) and not any(sampler is one for one in told):
            told.append(sampler)
            batch = getattr(value, "batch_size", 0) or getattr(getattr(value, "batch_sampler", 0), "batch_size", 0)
            changes.append(
                SamplerChange(name=name, was=before[1], now=now[1], batch_size=batch if isinstance(batch, int) else 0)
            )
    if others := len(resized) - len(told):
        changes.append(SamplerChange(count=others, was=before[1], now=now[1]))
    return [*changes, *of_some]


def _share_anew(sampler: DistributedSampler[Any], rank: int, world_size: int) -> None:
    epoch = sampler.epoch
    DistributedSampler.__init__(  # also for a subclass: its additional attributes stay
        sampler,
        sampler.dataset,
        num_replicas=world_size,
        rank=rank,
        shuffle=sampler.shuffle,
        seed=sampler.seed,
        drop_last=sampler.drop_last,
    )
    sampler.epoch = epoch


def _sampler_of(value: Any) -> Any:
    """Return the sampler of a loader; any other value unchanged."""
    if not issubclass(type(value), DataLoader):
        return value
    inner = getattr(value.batch_sampler, "sampler", None)
    return inner if issubclass(type(inner), DistributedSampler) else value.sampler
