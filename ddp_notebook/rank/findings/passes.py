"""Passes of data loaders over their data."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch.utils.data import DistributedSampler

from ddp_notebook.rank.findings.tensor_checks import checksum
from ddp_notebook.stdlib import weakref

_MOST = 100
_FEWEST = 3  # passes with one batch each before a finding


class _Pass:
    """A pass of a loader.

    Args:
        sampler: its distributed sampler.
        began_at: number of steps before it.
        has_more: a whole pass has more than one batch.
    """

    __slots__ = ("began_at", "checksum", "draws", "epoch", "has_more", "is_over", "repeats", "sampler", "trains")

    def __init__(self, sampler: Any, began_at: int, *, has_more: bool) -> None:
        self.sampler = weakref.ref(sampler)
        self.has_more = has_more
        self.draws: _Draws | None = None
        self.repeats = 0  # passes before it that have each drawn the same first batch, for one step
        self.checksum: int | None = None  # its first batch; until that is drawn, the first batch of the last pass
        self.epoch: Any = None  # unknown before the sampler is read
        self.began_at = began_at
        self.is_over = self.trains = False

    @property
    def took_one(self) -> bool:
        """Return whether it has drawn one of several batches."""
        return self.has_more and self.draws is not None and self.draws.count == 1


class _Draws:
    """Number of batches that one iterator of a loader has drawn."""

    __slots__ = ("at_backward", "count", "iterator", "number")

    def __init__(self, iterator: Any) -> None:
        self.iterator = weakref.ref(iterator)
        self.count = self.at_backward = 0
        self.number = -1  # among the iterators with a backward, since one rank may evaluate alone


class Passes:
    """Passes of the running cell.

    Args:
        note: keeps a fact.
    """

    def __init__(self, note: Callable[..., None]) -> None:
        self._note = note
        self.are_used = False  # a loader was used in the cell
        self._passes: weakref.WeakKeyDictionary[Any, _Pass] = weakref.WeakKeyDictionary()  # last pass by sampler
        self._draws: weakref.WeakKeyDictionary[Any, _Draws] = weakref.WeakKeyDictionary()  # by iterator
        self._last: _Draws | None = None
        self._numbers = self.last_step = 0
        self._position: tuple[int, int] | None = None
        self._expected = (0, 0, 0)
        self.draws: list[list[int]] = []  # step, number of the pass, number of batches drawn in it
        self._running: weakref.WeakKeyDictionary[Any, _Pass] = weakref.WeakKeyDictionary()  # by iterator

    def begin_cell(self) -> None:
        """Forget the passes of the last cell."""
        self._passes.clear()
        self._running.clear()
        self._draws.clear()
        self.draws = []
        self._last = self._position = None
        self._numbers = self.last_step = 0
        self.are_used = False

    def begin(self, loader: Any, iterator: Any, steps: int) -> None:
        """Start a pass. Notes one that repeats the order of the last one, if both are used for training."""
        self.are_used = True
        sampler = sampler_of(loader)
        if sampler is None or not sampler.shuffle or sampler.num_replicas < 2:
            return
        if type(sampler).__iter__ is not DistributedSampler.__iter__:  # its order may not depend on the epoch
            return
        has_more = False
        with suppress(TypeError):  # a batch sampler without a length
            has_more = len(loader) > 1
        self._running[iterator] = _Pass(sampler, steps, has_more=has_more)
        if loader.num_workers:  # they read the sampler now; without workers, the first batch does
            self._read(iterator)

    def _read(self, iterator: Any) -> None:
        """Keep the epoch of a pass whose sampler has been read."""
        one = self._running.get(iterator)
        sampler = None if one is None else one.sampler()
        if one is None or sampler is None or one.epoch is not None:
            return
        one.epoch = sampler.epoch
        last = self._passes.get(sampler)
        if last is not None and last.is_over and last.trains and last.epoch == one.epoch:
            one.trains = True  # noted at the end of the pass
        is_next = last is not None and last.took_one and last.began_at == one.began_at - 1
        # `_last`: no other loader gave a batch between them
        if last is not None and is_next and last.draws is self._last and last.epoch == one.epoch:
            one.repeats, one.checksum = last.repeats, last.checksum
        self._passes[sampler] = one

    def end(self, iterator: Any, steps: int) -> None:
        """End a pass, with the number of steps so far."""
        one = self._running.pop(iterator, None)
        if one is None:
            return
        repeats = one.trains
        one.is_over, one.trains = True, steps > one.began_at
        if repeats and one.trains:
            self._note("same-epoch", one.began_at + 1, epoch=one.epoch)

    def batch(self, iterator: Any, data: Any) -> None:
        """Count a batch."""
        last = self._last
        if last is None or last.iterator() is not iterator:
            last = self._draws.get(iterator)
            if last is None:
                last = self._draws[iterator] = _Draws(iterator)
                self._read(iterator)
                if (one := self._running.get(iterator)) is not None and one.has_more:
                    one.draws = last
                    self._compare(one, data)
            self._last, self.are_used = last, True
        last.count += 1

    def _compare(self, one: _Pass, data: Any) -> None:
        """Compare the first batch of a pass with that of the passes before. A data set may return random samples."""
        before, one.checksum = one.checksum, checksum([data]) or None  # 0: no tensor
        if before is None or before != one.checksum:
            one.repeats = 0
            return
        one.repeats += 1
        if one.repeats == _FEWEST:
            self._note("first-batch", one.began_at - _FEWEST + 1, last=one.began_at, epoch=one.epoch)

    def note_backward(self) -> None:
        """Keep the position of the loader from which the batch of a backward comes: the last one that was used."""
        if (last := self._last) is None or last.count == last.at_backward:
            return
        if last.number < 0:
            self._numbers += 1
            last.number = self._numbers - 1
        last.at_backward = last.count
        self._position = last.number, last.count

    def end_step(self, step: int) -> None:
        """Keep the position at a step, if it is not one batch after the last one."""
        if (position := self._position) is None:
            return
        number, count = position
        if (self._expected != (number, count, step) or not self.draws) and len(self.draws) < _MOST:
            self.draws.append([step, number, count])
        self.last_step = step
        self._expected = number, count + 1, step + 1

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
