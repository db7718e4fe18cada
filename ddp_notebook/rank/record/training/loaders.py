"""Data loaders: waits for each batch and for the start and the end of workers, settings, and counts of the loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, dataloader

from ddp_notebook.rank.group.sequences import Moment
from ddp_notebook.rank.hide_from_profiler import unseen
from ddp_notebook.rank.record.event_buffer import OFF, EventBuffer
from ddp_notebook.rank.record.training.model_names import new_name, nothing
from ddp_notebook.rank.record.training.step_observer import StepObserver, tell
from ddp_notebook.rank.record.training.wrapping import around
from ddp_notebook.records.schema import SPANS
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import contextlib, itertools, logging, threading, time, weakref


class LoopCounts:
    """Numbers of backward passes and of batches in the running or last cell. `TrainingSpans` resets them.

    They explain why a rank left its loop earlier than others.
    """

    def __init__(self) -> None:
        self.backwards = 0
        self.drawn: dict[str, int] = {}  # number of batches, by loader
        self.passes: dict[str, list[int]] = {}  # number of the last pass over each loader, and its batches
        self.ended: set[str] = set()  # loaders whose last pass has ended

    def begin(self, loader: str) -> None:
        """Count a pass over a loader."""
        number = self.passes[loader][0] if loader in self.passes else 0
        self.passes[loader] = [number + 1, 0]
        self.ended.discard(loader)

    def draw(self, loader: str) -> None:
        """Count a batch of a loader."""
        self.drawn[loader] = self.drawn.get(loader, 0) + 1
        self.passes.setdefault(loader, [0, 0])[1] += 1  # 0: an earlier cell has begun the pass

    def to_json(self) -> dict[str, Any]:
        """Return the counts. Callable from any thread."""
        passes = {loader: list(last) for loader, last in list(self.passes.items())}
        return {
            "backwards": self.backwards,
            "drawn": dict(self.drawn),
            "passes": passes,
            "ended": sorted(self.ended),
        }


_INPUT, _WORKERS = map(SPANS.index, ("input", "workers"))
_MOST_WAITING = 4096  # batches that workers may load in advance
_log = logging.getLogger(__name__)


class Settings(NamedTuple):
    """Settings of a loader. The fields are those of `records.LOADER`."""

    time_ns: int
    name: str
    moment: Moment
    workers: int
    is_persistent: bool
    batches: int
    prefetch: int


class DrawnIndices(NamedTuple):
    """Indices that a sampler gave for one batch."""

    time_ns: int
    name: str
    moment: Moment
    indices: tuple[Any, ...]


def summary_of(indices: tuple[Any, ...]) -> tuple[int, int, int, int] | None:
    """Return count, first, last, and the difference of consecutive indices, see `records.INDICES`.

    Returns None if the sampler gives no integers, for example for an `IterableDataset`.

    Example:
        >>> summary_of((1, 3, 5)), summary_of((5, 1, 3)), summary_of((None, None))
        ((3, 1, 5, 2), (3, 5, 3, 0), None)
    """
    if not indices or not all(type(one) is int or isinstance(one, np.integer) for one in indices):
        return None
    first, last, stride = int(indices[0]), int(indices[-1]), int(indices[1] - indices[0]) if len(indices) > 1 else 0
    if any(after - before != stride for before, after in itertools.pairwise(indices)):
        stride = 0
    return len(indices), first, last, stride


class _Epoch:
    """An iterator of a loader."""

    __slots__ = ("has_workers", "is_first", "name")

    def __init__(self, name: str, has_workers: bool) -> None:
        self.name = name
        self.has_workers = has_workers
        self.is_first = has_workers  # the next batch is the first one of the new workers


class Loaders:
    """Observer of this process's loaders, from `install` on.

    Args:
        event_buffer: receives their settings.
        put: adds a span, given its kind, name, start time and the samples in the batch.
        loop_counts: counts the batches.
    """

    def __init__(
        self, event_buffer: EventBuffer, put: Callable[[int, str, int, int], None], loop_counts: LoopCounts
    ) -> None:
        self._loop_counts = loop_counts
        self._event_buffer = event_buffer
        self._put = put
        self._naming = threading.Lock()  # several threads may create loaders at once
        self._names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._epochs: weakref.WeakKeyDictionary[Any, _Epoch] = weakref.WeakKeyDictionary()
        # Indices of the batches of an iterator that the program has not got yet; None: their order is not known.
        self._drawn: weakref.WeakKeyDictionary[Any, deque[tuple[Any, ...]] | None] = weakref.WeakKeyDictionary()
        self._last: tuple[Callable[[], Any], _Epoch | None] = nothing, None  # latest iterator, probably used again
        self.observer: StepObserver | None = None
        self.told: set[str] = set()  # loaders whose settings were recorded in this cell

    def install(self) -> None:
        """Wrap the methods of loaders.

        Raises:
            AttributeError: this torch has no such methods.
        """
        around(dataloader._BaseDataLoaderIter, "__next__", self._around_next)
        around(DataLoader, "__iter__", self._around_iter)
        around(dataloader._BaseDataLoaderIter, "_next_index", self._around_next_index)
        around(dataloader._BaseDataLoaderIter, "_reset", self._around_reset)

    def _around_iter(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __iter__(loader: Any) -> Any:
            if self._event_buffer.level == OFF:
                return original(loader)
            began_ns = time.monotonic_ns()
            iterator = original(loader)
            try:
                self._begin(loader, iterator, began_ns)
            except Exception:  # the user's loop must continue
                _log.info("a loader was not recorded", exc_info=True)
            if self.observer is not None:
                tell(self.observer.loader_begins, loader, iterator)
            return iterator

        return __iter__

    def _begin(self, loader: Any, iterator: Any, began_ns: int) -> None:
        with self._naming:
            if (name := self._names.get(loader)) is None:
                name = self._names[loader] = new_name(loader, set(self._names.values()))
        epoch = self._epochs.get(iterator)
        if epoch is None:
            epoch = self._epochs[iterator] = _Epoch(name, loader.num_workers > 0)
            if epoch.has_workers:
                self._put(_WORKERS, name, began_ns, -1)
        self._loop_counts.begin(name)
        self._last = weakref.ref(iterator), epoch
        if name not in self.told:
            self.told.add(name)
            prefetch = loader.prefetch_factor
            self._event_buffer.put(
                Settings(
                    began_ns,
                    name,
                    self._event_buffer.moment,
                    loader.num_workers,
                    bool(loader.persistent_workers),
                    _batches(loader),
                    -1 if prefetch is None else prefetch,
                )
            )

    # The indices are followed while nothing is recorded too, since workers draw those of later batches in advance.

    def _around_reset(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def _reset(iterator: Any, *args: Any, **named: Any) -> Any:
            self._drawn[iterator] = deque()
            return original(iterator, *args, **named)

        return _reset

    def _around_next_index(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def _next_index(iterator: Any) -> Any:
            index = original(iterator)
            waiting = self._drawn.setdefault(iterator, deque())
            if waiting is not None:
                # A copy, since a sampler may use its list again.
                waiting.append(tuple(index) if isinstance(index, list | tuple) else (index,))
                if len(waiting) > _MOST_WAITING or not getattr(iterator, "_in_order", True):
                    self._drawn[iterator] = None
            return index

        return _next_index

    def _take_indices(self, iterator: Any) -> tuple[Any, ...]:
        waiting = self._drawn.get(iterator)
        return waiting.popleft() if waiting else ()

    def _note_indices(self, name: str, indices: tuple[Any, ...]) -> None:
        if indices:
            self._event_buffer.put(DrawnIndices(time.monotonic_ns(), name, self._event_buffer.moment, indices))

    def _around_next(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __next__(iterator: Any) -> Any:
            if self._event_buffer.level == OFF:
                try:
                    return original(iterator)
                except BaseException:
                    self._drawn[iterator] = None
                    raise
                finally:
                    self._take_indices(iterator)
            last, epoch = self._last
            if last() is not iterator:
                epoch = self._epochs.get(iterator)
            began_ns = time.monotonic_ns()
            try:
                data = original(iterator)
            except StopIteration:
                if self.observer is not None:
                    tell(self.observer.loader_ended, iterator)
                if epoch is not None:
                    self._loop_counts.ended.add(epoch.name)
                if epoch is not None and epoch.has_workers:  # the workers end too, unless they are persistent
                    self._put(_WORKERS, epoch.name, began_ns, -1)
                raise
            except BaseException:
                self._drawn[iterator] = None  # the program may have lost a batch
                raise
            kind = _INPUT
            if epoch is not None:
                self._loop_counts.draw(epoch.name)
            if epoch is not None and epoch.is_first:
                kind, epoch.is_first = _WORKERS, False
            samples = unseen(samples_of, data if isinstance(data, list | tuple) else (data,))
            name = "" if epoch is None else epoch.name
            self._put(kind, name, began_ns, samples)
            self._note_indices(name, self._take_indices(iterator))
            if self.observer is not None:
                tell(self.observer.batch, iterator, data)
            return data

        return __next__


def _batches(loader: Any) -> int:
    """Return the number of batches per epoch; -1 if it cannot be read without side effects."""
    if isinstance(loader.dataset, IterableDataset):  # torch compares its length with the number of batches
        return -1
    with contextlib.suppress(Exception):  # raised by a user's sampler
        return len(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)
    return -1


def samples_of(values: Any) -> int:
    """Return the batch size: the first dimension of the first tensor; -1 if there is none."""
    for value in values:
        if isinstance(value, torch.Tensor):
            try:
                return int(value.size(0))
            except IndexError:  # the tensor has no dimensions
                continue
            except RuntimeError:  # a nested tensor has none
                return -1
    return -1
