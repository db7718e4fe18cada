"""Random numbers of the first training step of a cell: states of the generators, and the parts that drew from them.

Two parts are looked at: the fetch of the first batch of a data loader, which runs the transforms of its data set, and
the forward of the first model, which may have dropout. For each generator, a part has the checksum of the state before
it, and whether the state changed. The notebook compares the ranks (`run/findings/random_numbers`).

A fetch may run in a worker process. Workers are forked, so they inherit the wrapper of torch's fetcher and the shared
memory in which the first worker leaves its part. A worker that is not forked leaves nothing, and nothing is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DistributedSampler, get_worker_info
from torch.utils.data._utils.fetch import _BaseDatasetFetcher

from ddp_notebook.rank.findings.passes import sampler_of
from ddp_notebook.rank.findings.tensor_checks import checksum
from ddp_notebook.rank.hide_from_profiler import unseen
from ddp_notebook.rank.record.training.wrapping import around
from ddp_notebook.rank.variables import random_states
from ddp_notebook.stdlib import functools, logging, mmap, struct, weakref

_log = logging.getLogger(__name__)
Part = dict[str, list[Any]]  # checksum of the state before the part, and whether it changed, by generator
_GENERATORS = ("torch", "Python", "NumPy")  # generators of a worker
_RECORD = struct.Struct("<q3I3?")  # seed of the iterator, and the part of its first worker
_SLOTS = 64


def part(before: Mapping[str, int], after: Mapping[str, int]) -> Part:
    """Return the part between two checksums of the states.

    Example:
        >>> part({"torch": 5, "Python": 7}, {"torch": 6, "Python": 7})
        {'torch': [5, True], 'Python': [7, False]}
    """
    return {name: [value, after.get(name) != value] for name, value in before.items()}


def _now() -> dict[str, int]:
    found: dict[str, int] = unseen(lambda: random_states.checksums(random_states.read()))
    return found


class RandomDraws:
    """The first training step of the running cell.

    Args:
        is_on: returns whether the cell is recorded.

    Attributes:
        are_used: something was kept since the start of the cell.
    """

    def __init__(self, is_on: Callable[[], bool]) -> None:
        self._is_on = is_on
        self.are_used = False
        self._looks = True  # the first training step of the cell has not begun
        self._before: dict[str, int] | None = None  # states before the running forward
        self._fetched: weakref.WeakKeyDictionary[Any, Part] = weakref.WeakKeyDictionary()  # first batch, by fetcher
        self._waiting: weakref.WeakSet[Any] = weakref.WeakSet()  # fetchers that have fetched no batch yet
        self._samplers: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # by iterator
        self._own_seeds: weakref.WeakSet[Any] = weakref.WeakSet()  # iterators whose workers the program seeds
        self._last: tuple[Any, int | None] | None = None  # reference to the last iterator, checksum of its first batch
        self._shared = mmap.mmap(-1, _RECORD.size * _SLOTS)  # with the forked workers of this process
        self._inputs: int | None = None  # checksum of the inputs of the first training forward
        self._facts: dict[str, Any] = {}
        around(_BaseDatasetFetcher, "__init__", self._around_fetcher)

    def begin_cell(self) -> None:
        """Forget the last cell."""
        self.are_used = False
        self._looks, self._before, self._last, self._inputs = True, None, None, None
        if self._facts:
            self._facts = {}

    def end_cell(self) -> None:
        """Leave nothing in the loaders of the user, which other features may copy."""
        for fetcher in list(self._waiting):
            vars(fetcher).pop("fetch", None)
        self._waiting.clear()

    # ---- loaders

    def _around_fetcher(self, original: Callable[..., None]) -> Callable[..., None]:
        def __init__(fetcher: Any, *args: Any, **named: Any) -> None:
            original(fetcher, *args, **named)
            # A worker process records nothing, so its own level is off.
            if self._looks and (get_worker_info() or self._is_on()):
                self.are_used = True
                fetcher.fetch = functools.partial(self._fetch_first, fetcher)
                self._waiting.add(fetcher)

        return __init__

    def _fetch_first(self, fetcher: Any, index: Any) -> Any:
        """Fetch the first batch of a loader. Later ones are fetched by torch alone."""
        del fetcher.fetch
        self._waiting.discard(fetcher)
        if not self._looks:
            return fetcher.fetch(index)
        before = _now()
        data = fetcher.fetch(index)
        try:
            self._fetched[fetcher] = found = part(before, _now())
            self._tell_parent(found)
        except Exception:  # the user's loop must continue
            _log.info("random states of a batch were not read", exc_info=True)
        return data

    def _tell_parent(self, found: Part) -> None:
        """Leave the part of the first worker of an iterator in shared memory."""
        info = get_worker_info()
        if info is None or info.id:
            return
        values = [found.get(name, [0, False]) for name in _GENERATORS]
        _RECORD.pack_into(self._shared, _slot(info.seed), info.seed, *(v for v, _ in values), *(d for _, d in values))

    def loader_begins(self, loader: Any, iterator: Any) -> None:
        """Keep the sampler of an iterator, with its epoch if workers have read it."""
        if not self._looks:
            return
        self.are_used = True
        if loader.num_workers and (loader.generator is not None or loader.worker_init_fn is not None):
            self._own_seeds.add(iterator)
        if (sampler := sampler_of(loader)) is not None:
            self._samplers[iterator] = sampler.seed, sampler.epoch if loader.num_workers else None, sampler

    def batch(self, iterator: Any, data: Any) -> None:
        """Keep the first batch of an iterator."""
        if self._looks and (self._last is None or self._last[0]() is not iterator):
            self.are_used = True
            self._last = weakref.ref(iterator), unseen(checksum, [data])

    def _of_loader(self) -> dict[str, Any]:
        """Return the facts of the iterator that gave the last batch."""
        iterator = None if self._last is None else self._last[0]()
        if iterator is None or self._last is None:
            return {}
        found: dict[str, Any] = {"batch": self._last[1]}
        if (fetcher := getattr(iterator, "_dataset_fetcher", None)) is not None:
            found["fetch"] = self._fetched.get(fetcher)
        elif (own := self._of_worker(getattr(iterator, "_base_seed", None))) is not None:
            found |= {"fetch": own, "seeds": "program" if iterator in self._own_seeds else "torch"}
        if (sampler := self._samplers.get(iterator)) is not None:
            seed, epoch, one = sampler
            if one.shuffle and one.num_replicas > 1 and type(one).__iter__ is DistributedSampler.__iter__:
                own_order = [seed, one.epoch if epoch is None else epoch]
                if all(type(number) is int for number in own_order):
                    found["sampler"] = [one.num_replicas, one.rank, len(one.dataset), *own_order]
        return found

    def _of_worker(self, seed: int | None) -> Part | None:
        """Return the part that the first worker of an iterator has left; None if there is none."""
        if seed is None:
            return None
        own, *values = _RECORD.unpack_from(self._shared, _slot(seed))
        if own != seed:
            return None
        count = len(_GENERATORS)
        return {name: [values[n], values[n + count]] for n, name in enumerate(_GENERATORS)}

    # ---- models

    def forward_begins(self) -> None:
        """Keep the states before a training forward."""
        # FSDP calls it for each of its modules, the root first.
        if self._looks and self._before is None and torch.is_grad_enabled() and not _is_capturing():
            self.are_used = True
            self._before = _now()

    def inputs(self, values: Sequence[Any]) -> None:
        """Keep a checksum of the inputs of the first training forward. It has begun or ended."""
        if self._inputs is None and (self._before is not None or self._facts):
            self._inputs = unseen(checksum, values)

    def forward_ends(self, model: Any) -> bool:
        """Keep the facts of the first training forward of the cell. Return whether it was this one.

        Args:
            model: the model in DDP or FSDP.
        """
        if self._before is None:
            return False
        self._looks = False
        found = part(self._before, _now())
        self._before = None
        drops = any(is_drawn for _, is_drawn in found.values()) and any(map(_drops, model.modules()))
        self._facts = {"forward": found, "drops": drops, **self._of_loader()}
        return True

    def facts(self) -> dict[str, Any]:
        """Return the facts of the cell; {} if it had no training forward."""
        return {**self._facts, "inputs": self._inputs} if self._facts else {}


def _slot(seed: int) -> int:
    return seed % _SLOTS * _RECORD.size


def _drops(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.training and module.p > 0


def _is_capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
