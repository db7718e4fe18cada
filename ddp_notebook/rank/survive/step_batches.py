"""Batch of each step of a loop, the same for a repeated step, in this process or a replacement."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, DistributedSampler, Sampler

from ddp_notebook.rank.variables import random_states

_KEPT = 2  # number of stored batches, because ranks go back by at most one step


def is_source(member: object) -> bool:
    """Return whether an object provides batches: a loader or a sampler."""
    return isinstance(member, DataLoader | Sampler)


class _Kept(NamedTuple):
    batch: Any
    after: random_states.RandomStates  # after the batch
    position: tuple[Any, ...]


class Batches:
    """Iterates over a loader, epoch after epoch, and sets the epoch of its samplers.

    Loaders and data sets use random numbers, so a repeated batch also restores the random states after it.

    Args:
        source: a loader or a sampler.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self._iterator: Iterator[Any] | None = None
        self._kept: dict[int, _Kept] = {}  # step -> stored batch
        self._epoch = self._index = 0  # position of the iterator
        self._of_epoch: Any = None  # state of random numbers when the iterator was created

    def at(self, step: int) -> Any:
        """Return the batch of a step: the next step, or one of the last steps.

        Raises:
            ValueError: the source is empty.
        """
        if (kept := self._kept.get(step)) is not None:
            random_states.restore(kept.after)
            return kept.batch
        if self._iterator is None:
            self._begin()
        before = random_states.read()
        try:
            batch = next(self._iterator)  # type: ignore[arg-type]
        except StopIteration:
            if not self._index:
                raise ValueError(f"survive() got an empty {type(self._source).__name__}: it has no batch") from None
            self._epoch, self._index = self._epoch + 1, 0
            self._begin()
            before = random_states.read()
            batch = next(self._iterator)  # type: ignore[arg-type]
        self._index += 1
        self._keep(step, batch, before)
        return batch

    def _keep(self, step: int, batch: Any, before: Any) -> None:
        position = (self._epoch, self._index, self._of_epoch, before)
        self._kept[step] = _Kept(batch, random_states.read(), position)
        self._kept.pop(step - _KEPT, None)

    def _begin(self) -> None:
        for one in self._samplers():
            if callable(set_epoch := getattr(one, "set_epoch", None)):
                set_epoch(self._epoch)
        self._of_epoch = random_states.read()
        self._iterator = iter(self._source)

    def _samplers(self) -> list[Any]:
        """Return the source and its samplers."""
        source = self._source
        batch_sampler = getattr(source, "batch_sampler", None)
        return [source, getattr(source, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]

    def position(self, step: int) -> tuple[Any, ...] | None:
        """Return the position after the batch of a step, for `go_to`; None without such a batch."""
        kept = self._kept.get(step)
        return None if kept is None else kept.position

    @property
    def batch_size(self) -> int:
        """Return the number of samples in one batch, if the loader has a batch size; otherwise 0."""
        inner = getattr(self._source, "batch_sampler", None)
        return getattr(self._source, "batch_size", 0) or getattr(inner, "batch_size", 0) or 0

    def share_anew(self, step: int, was: int, now: int) -> None:
        """Share the remaining data of the epoch among fewer ranks, from this step on.

        The samplers already have the new number of ranks. The data that no rank used in a complete step is shared. Up
        to as many batches as there are ranks may be repeated, but no sample is left out. A source that is not shared
        among ranks continues with the same batch.

        Args:
            step: number of the step.
            was, now: previous and new number of ranks.
        """
        if not any(isinstance(one, DistributedSampler) and one.num_replicas == now for one in self._samplers()):
            return
        if (kept := self._kept.get(step)) is not None:
            self._epoch, index, of_epoch, before = kept.position
            index -= 1
        else:
            index, of_epoch, before = self._index, self._of_epoch, random_states.read()
        self._kept.clear()
        self._index = index * was // now
        random_states.restore(of_epoch)
        self._begin()
        assert self._iterator is not None
        for _ in range(self._index):
            next(self._iterator, None)
        random_states.restore(before)

    def go_to(self, step: int, position: tuple[Any, ...]) -> None:
        """Move to the position of another process after the batch of this step.

        Earlier batches of the epoch are discarded.
        """
        self._epoch, self._index, of_epoch, before = position
        random_states.restore(of_epoch)
        self._begin()
        assert self._iterator is not None
        for _ in range(self._index - 1):
            next(self._iterator)
        random_states.restore(before)
        self._kept.clear()
        self._keep(step, next(self._iterator), before)
