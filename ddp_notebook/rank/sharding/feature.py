"""The feature of a rank that finds wrong uses of sharded models, and explains the errors that torch raises then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddp_notebook.messages.ranks import RunCell
from ddp_notebook.rank.group.recorder import Recorder
from ddp_notebook.rank.hooks import Core, Feature
from ddp_notebook.rank.sharding import equations, mistakes
from ddp_notebook.rank.sharding.mistakes import Mistakes
from ddp_notebook.stdlib import contextlib


class ShardingFeature(Feature):
    """Reports wrong uses of models that are spread over ranks."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._mistakes = watch(core.network.recorder)

    def cell_begins(self, cell: RunCell) -> None:
        self._mistakes.cell = cell.cell

    def explain(self, error: BaseException) -> str:
        return mistakes.explain_unsharded(error)

    def facts(self, namespace: Mapping[str, Any]) -> Mapping[str, Any]:
        return self._mistakes.facts(namespace)


def watch(recorder: Recorder) -> Mistakes:
    """Look for wrong uses from now on. Call it before the recording is made, which notes modules for it.

    Args:
        recorder: sees collectives, and knows the modules that they are for.
    """
    mistakes = Mistakes(recorder, recorder.modules)
    mistakes.watch()
    with contextlib.suppress(ImportError, AttributeError):  # this torch lacks a function: its own errors stay
        equations.watch()
    return mistakes


FEATURE = ShardingFeature
