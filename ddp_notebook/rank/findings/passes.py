"""Passes of data loaders over their data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import DistributedSampler

from ddp_notebook.stdlib import weakref


class _Pass:
    """A pass of a loader."""

    __slots__ = ("batches", "began_at", "epoch", "is_over", "sampler", "trains")

    def __init__(self, sampler: Any, began_at: int) -> None:
        self.sampler = weakref.ref(sampler)
        self.epoch = sampler.epoch
        self.began_at = began_at  # number of steps before it
        self.is_over = self.trains = False


class Passes:
    """Passes of the running cell.

    Args:
        note: keeps a fact.
    """

    def __init__(self, note: Callable[..., None]) -> None:
        self._note = note
        self._passes: weakref.WeakKeyDictionary[Any, _Pass] = weakref.WeakKeyDictionary()  # last pass by sampler
        self._running: weakref.WeakKeyDictionary[Any, _Pass] = weakref.WeakKeyDictionary()  # by iterator

    def begin_cell(self) -> None:
        """Forget the passes of the last cell."""
        if self._passes or self._running:
            self._passes.clear()
            self._running.clear()

    def begin(self, loader: Any, iterator: Any, steps: int) -> None:
        """Start a pass. Notes one that repeats the order of the last one, if both are used for training."""
        sampler = sampler_of(loader)
        if sampler is None or not sampler.shuffle or sampler.num_replicas < 2:
            return
        last = self._passes.get(sampler)
        one = _Pass(sampler, steps)
        if last is not None and last.is_over and last.trains and last.epoch == one.epoch:
            self._running[iterator] = one
            one.trains = True  # noted at the end of its first step
        self._passes[sampler] = self._running[iterator] = one

    def end(self, iterator: Any, steps: int) -> None:
        """End a pass, with the number of steps so far."""
        one = self._running.pop(iterator, None)
        if one is None:
            return
        repeats = one.trains
        one.is_over, one.trains = True, steps > one.began_at
        if repeats and one.trains:
            self._note("same-epoch", one.began_at + 1, epoch=one.epoch)

    def batch(self, iterator: Any) -> None:
        """Count a batch."""

    def end_cell(self, steps: int) -> None:
        """End the passes that a cell has left early."""
        for iterator in list(self._running):
            self.end(iterator, steps)


def sampler_of(loader: Any) -> DistributedSampler[Any] | None:
    """Return the distributed sampler of a loader; None if it has none."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    for one in (getattr(batch_sampler, "sampler", None), getattr(loader, "sampler", None)):
        if isinstance(one, DistributedSampler):
            return one
    return None
