"""The batch of each step of a loop: the same one when the step is done again, here or by a new process of the rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, DistributedSampler, Sampler

_KEPT = 2  # batches: ranks may go back by one step


def is_source(member: object) -> bool:
    """Whether batches come from this: a loader or a sampler."""
    return isinstance(member, DataLoader | Sampler)


class _Kept(NamedTuple):
    batch: Any
    after: Any  # random numbers
    position: tuple[Any, ...]


class Batches:
    """Goes through a loader, epoch after epoch, and tells its samplers which.

    Args:
        source: a loader or a sampler.
        read_random, set_random: the state of all random numbers of this process. Loaders and data sets draw from them,
            so a batch that comes from here once more leaves them as it did the first time.
    """

    def __init__(self, source: Any, read_random: Callable[[], Any], set_random: Callable[[Any], None]) -> None:
        self._source = source
        self._read_random, self._set_random = read_random, set_random
        self._iterator: Iterator[Any] | None = None
        self._kept: dict[int, _Kept] = {}  # by step
        self._epoch = self._index = 0  # where the iterator stands
        self._of_epoch: Any = None  # random numbers when it was made

    def at(self, step: int) -> Any:
        """The batch of a step: of the next one, or of one of the last.

        Raises:
            ValueError: the source is empty.
        """
        if (kept := self._kept.get(step)) is not None:
            self._set_random(kept.after)
            return kept.batch
        if self._iterator is None:
            self._begin()
        before = self._read_random()
        try:
            batch = next(self._iterator)  # type: ignore[arg-type]
        except StopIteration:
            if not self._index:
                raise ValueError(f"survive() got an empty {type(self._source).__name__}: it has no batch") from None
            self._epoch, self._index = self._epoch + 1, 0
            self._begin()
            before = self._read_random()
            batch = next(self._iterator)  # type: ignore[arg-type]
        self._index += 1
        self._keep(step, batch, before)
        return batch

    def _keep(self, step: int, batch: Any, before: Any) -> None:
        position = (self._epoch, self._index, self._of_epoch, before)
        self._kept[step] = _Kept(batch, self._read_random(), position)
        self._kept.pop(step - _KEPT, None)

    def _begin(self) -> None:
        for one in self._samplers():
            if callable(set_epoch := getattr(one, "set_epoch", None)):
                set_epoch(self._epoch)
        self._of_epoch = self._read_random()
        self._iterator = iter(self._source)

    def _samplers(self) -> list[Any]:
        """The source, and the samplers that it draws from."""
        source = self._source
        batch_sampler = getattr(source, "batch_sampler", None)
        return [source, getattr(source, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]

    def position(self, step: int) -> tuple[Any, ...] | None:
        """Where it stood after it had given the batch of a step, for `go_to`; None: there is none."""
        kept = self._kept.get(step)
        return None if kept is None else kept.position

    @property
    def batch_size(self) -> int:
        """Samples of one batch, as far as the loader says it; 0: not known."""
        inner = getattr(self._source, "batch_sampler", None)
        return getattr(self._source, "batch_size", 0) or getattr(inner, "batch_size", 0) or 0

    def share_anew(self, step: int, was: int, now: int) -> None:
        """There are fewer ranks, and the samplers know it: from this step on share what no rank has had in a whole step
        of this epoch. (Up to as many batches as there are ranks come twice, and no sample is left out.) A source that
        is not shared among the ranks goes on with the same batch.

        Args:
            was, now: how many ranks there were, and are.
        """
        if not any(isinstance(one, DistributedSampler) and one.num_replicas == now for one in self._samplers()):
            return
        if (kept := self._kept.get(step)) is not None:
            self._epoch, index, of_epoch, before = kept.position
            index -= 1
        else:
            index, of_epoch, before = self._index, self._of_epoch, self._read_random()
        self._kept.clear()
        self._index = index * was // now
        self._set_random(of_epoch)
        self._begin()
        assert self._iterator is not None
        for _ in range(self._index):
            next(self._iterator, None)
        self._set_random(before)

    def go_to(self, step: int, position: tuple[Any, ...]) -> None:
        """Stand where another process stood after it had given the batch of this step. What lies before it in its epoch
        is read and thrown away."""
        self._epoch, self._index, of_epoch, before = position
        self._set_random(of_epoch)
        self._begin()
        assert self._iterator is not None
        for _ in range(self._index - 1):
            next(self._iterator)
        self._set_random(before)
        self._kept.clear()
        self._keep(step, next(self._iterator), before)
