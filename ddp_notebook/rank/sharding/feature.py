"""Sharding feature of a rank: detects mistakes with sharded models, and explains the resulting torch errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ddp_notebook.messages.encoding import Message
from ddp_notebook.messages.mesh_messages import ListMeshes
from ddp_notebook.messages.ranks import Checked, RunCell
from ddp_notebook.rank.group.recorder import Recorder
from ddp_notebook.rank.hooks import Core, Feature
from ddp_notebook.rank.sharding import equations, mistakes, out_of_memory
from ddp_notebook.rank.sharding.allocator_history import AllocatorHistory
from ddp_notebook.rank.sharding.mistakes import Mistakes
from ddp_notebook.rank.variables import meshes
from ddp_notebook.stdlib import contextlib


class ShardingFeature(Feature):
    """Reports mistakes with models that are sharded over ranks."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._mistakes = watch(core.network.recorder)
        self._has_failed = False  # a cell, since the last facts
        self._allocator = AllocatorHistory() if torch.version.cuda or torch.version.hip else None

    def cell_begins(self, cell: RunCell) -> None:
        self._mistakes.cell = cell.cell
        if self._allocator is not None:
            self._allocator.begin()

    def cell_failed(self, error: BaseException) -> None:
        self._has_failed = True
        if self.core.shell is not None:
            where, allocator = self.core.network.where, self._allocator
            out_of_memory.note(
                error,
                self.core.shell.user_ns,
                where.of_traceback,
                lambda: {} if allocator is None else allocator.read(where.of_calls),
            )

    def cell_facts(self) -> Sequence[Sequence[Any]]:
        if not self._has_failed:
            return ()
        self._has_failed = False
        return out_of_memory.take_fact()

    def explain(self, error: BaseException) -> str:
        return mistakes.explain_unsharded(error)

    def at_once(self) -> Mapping[type[Message], Callable[[Any], object]]:
        return {ListMeshes: self._list_meshes}

    def _list_meshes(self, message: ListMeshes) -> bool:
        shell = self.core.shell
        found = [] if shell is None else meshes.coordinates(shell.user_ns)
        self.core.send(Checked(request=message.request, facts={"meshes": found}))
        return True

    def facts(self, namespace: Mapping[str, Any]) -> Mapping[str, Any]:
        return self._mistakes.facts(namespace)


def watch(recorder: Recorder) -> Mistakes:
    """Start to detect mistakes. Call it before the recording is created, which registers modules for it.

    Args:
        recorder: collectives of the rank, and the modules that use them.
    """
    mistakes = Mistakes(recorder, recorder.modules)
    mistakes.watch()
    with contextlib.suppress(ImportError, AttributeError):  # this torch version lacks a function: its own errors stay
        equations.watch()
    return mistakes


FEATURE = ShardingFeature
