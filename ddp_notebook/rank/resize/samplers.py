"""Samplers of data that share it out among the ranks: they go over as many as there are now."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler

from ddp_notebook.stdlib import gc


def there() -> list[DistributedSampler[Any]]:
    """Those of this process."""
    return [one for one in gc.get_objects() if issubclass(type(one), DistributedSampler)]


def resize(
    before: tuple[int, int],
    now: tuple[int, int],
    namespace: Mapping[str, Any],
    but: Collection[DistributedSampler[Any]] = (),
) -> list[str]:
    """Let the samplers of this process go over other ranks. Their epoch, seed and order stay.

    Args:
        before: this rank and how many there were, as in the samplers; in a new rank those of the rank that they are
            copies of.
        now: this rank and how many there are.
        namespace: the user's variables, which give loaders their names.
        but: not these.

    Returns:
        What the user has to know, the same on all ranks.
    """
    notes = []
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
    of_some = []
    if left:
        which = "1 DistributedSampler is" if left == 1 else f"{left} DistributedSamplers are"
        of_some = [f"{which} not for all the ranks that there were, and left as before"]
    if before[1] == now[1]:  # only the numbers of ranks have changed
        return of_some
    goes = f"over {'1 rank' if now[1] == 1 else f'{now[1]} ranks'} now"
    told: list[Any] = []
    variables = sorted(namespace.items(), key=lambda item: issubclass(type(item[1]), DistributedSampler))
    for name, value in variables:  # loaders before samplers, which they may have
        sampler = _sampler_of(value)
        if any(sampler is one for one in resized) and not any(sampler is one for one in told):
            told.append(sampler)
            note = f"{name} goes {goes}"
            if batch := getattr(value, "batch_size", 0) or getattr(getattr(value, "batch_sampler", 0), "batch_size", 0):
                note += f": {of_step(batch, before[1], now[1])}"
            notes.append(note)
    if others := len(resized) - len(told):
        notes.append(f"{'1 DistributedSampler goes' if others == 1 else f'{others} DistributedSamplers go'} {goes}")
    return [*notes, *of_some]


def of_step(batch_size: int, was: int, now: int) -> str:
    """What a step of all ranks has now.

    Args:
        batch_size: of one rank; 0: not known.
        was, now: how many ranks there were, and are.

    Example:
        >>> of_step(4, 3, 2)
        'with batches of 4 a step has 8 samples, and had 12'
    """
    if batch_size:
        return f"with batches of {batch_size} a step has {batch_size * now} samples, and had {batch_size * was}"
    return f"a step has {now}/{was} of the samples that it had, if each rank's batch stays as large"


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


def _sampler_of(value: Any) -> Any:
    """The sampler of a loader, or this one."""
    if not issubclass(type(value), DataLoader):
        return value
    inner = getattr(value.batch_sampler, "sampler", None)
    return inner if issubclass(type(inner), DistributedSampler) else value.sampler
