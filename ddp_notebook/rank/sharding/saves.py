"""Checkpoints saved by this rank. A checkpoint is only complete if all ranks that hold parts of it save them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import get_process_group_ranks, is_initialized

from ddp_notebook.rank.imports import after_import
from ddp_notebook.rank.sharding.observed_functions import after
from ddp_notebook.rank.sharding.replicas import ranks_along
from ddp_notebook.stdlib import os, socket, stat, threading

_MOST = 100  # maximum number of recorded saves per cell
_MOST_TENSORS = 10_000
_DEPTH = 4  # nesting depth of dicts and lists in saved objects
_SAVER = "torch.distributed.checkpoint.state_dict_saver"


class Saves:
    """Checkpoints saved by this rank.

    Args:
        cell: returns the number of the running cell.

    Example:
        >>> Saves(lambda: 1).facts()
        []
    """

    def __init__(self, cell: Callable[[], int]) -> None:
        self._told: list[dict[str, Any]] = []
        self._cell = cell
        self._told_in = 0  # cell of `_told`

    def facts(self) -> list[dict[str, Any]]:
        """Return facts about the saves of the last `cell` that saved something.

        `how` is "distributed" or "alone" (by `torch.save`). A distributed save has its `path` and the `ranks` that save
        together. Others have `path`, `file` (identity of the file), the number of `sharded` tensors, and the `ranks`
        with the other parts of these tensors.
        """
        return [one | {"file": _file(one["path"])} if one["how"] == "alone" else one for one in self._told]

    def watch(self) -> None:
        """Replace the torch functions.

        Raises:
            AttributeError: this torch version lacks the functions.
        """
        after(torch, "save", self._alone)
        torch.serialization.save = torch.save  # pickle finds the function by this name
        after_import(_SAVER, self._watch_distributed)

    def _watch_distributed(self) -> None:
        for name in ("save", "async_save"):
            after(sys.modules[_SAVER], name, self._distributed)

    def _alone(self, obj: Any = None, f: Any = None, *_: Any, **__: Any) -> None:
        if isinstance(f, str | os.PathLike):
            sharded, ranks = _sharded(obj)
            self._keep(how="alone", path=os.path.realpath(f), sharded=sharded, ranks=sorted(ranks))

    def _distributed(
        self,
        *_: Any,
        checkpoint_id: Any = None,
        storage_writer: Any = None,
        process_group: Any = None,
        no_dist: bool = False,
        **__: Any,
    ) -> None:
        # The thread of `async_save` calls `save`, but `async_save` was already recorded.
        if no_dist or not is_initialized() or threading.current_thread() is not threading.main_thread():
            return
        path = checkpoint_id if checkpoint_id is not None else getattr(storage_writer, "path", None)
        if path is not None:
            ranks = get_process_group_ranks(process_group or dist.group.WORLD)
            self._keep(how="distributed", path=os.path.abspath(path), ranks=ranks)

    def _keep(self, **facts: Any) -> None:
        if (cell := self._cell()) != self._told_in:
            self._told_in, self._told = cell, []
        if len(self._told) < _MOST:
            self._told.append({"cell": cell, **facts})


def _file(path: str) -> list[Any]:
    """Return the identity of a file across machines; empty if it does not exist or is a device such as /dev/null."""
    try:
        facts = os.stat(path)
    except OSError:
        return []
    return [socket.gethostname(), facts.st_dev, facts.st_ino] if stat.S_ISREG(facts.st_mode) else []


def _sharded(what: Any) -> tuple[int, set[int]]:
    """Return the number of tensors with parts on other ranks, and these ranks."""
    count, ranks = 0, set[int]()
    for tensor in islice(_tensors(what, _DEPTH), _MOST_TENSORS):
        if hasattr(tensor, "placements"):
            dims = [dim for dim, placement in enumerate(cast(Any, tensor).placements) if placement.is_shard()]
            others = ranks_along(cast(Any, tensor).device_mesh, dims)
            if len(others) > 1:
                count += 1
                ranks.update(others)
    return count, ranks


def _tensors(what: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(what, torch.Tensor):
        yield what
    elif isinstance(what, torch.nn.Module):
        yield from torch.nn.Module.parameters(what)
    elif depth and isinstance(what, Mapping):
        for value in what.values():
            yield from _tensors(value, depth - 1)
    elif depth and isinstance(what, list | tuple):
        for value in what:
            yield from _tensors(value, depth - 1)
