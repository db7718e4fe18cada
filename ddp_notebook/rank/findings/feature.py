"""Feature of a rank that collects facts about its training steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddp_notebook.messages.ranks import RunCell
from ddp_notebook.rank.findings.step_facts import StepFacts
from ddp_notebook.rank.hooks import Core, Feature


class FindingsFeature(Feature):
    """Facts about the training steps of each cell, which the recording observes."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        assert core.recording is not None  # without it this feature is off: see `switches.NEEDS`
        training, where = core.recording.training, core.network.where
        self._steps = StepFacts(training, lambda: core.shell.user_ns, where.of_calls, where.cells)
        training.observe(self._steps)
        core.network.recorder.user_calls = self._steps.operations

    def cell_begins(self, cell: RunCell) -> None:
        self._steps.begin_cell()

    def cell_ends(self) -> None:
        if self._steps.operations.calls:
            self._steps.operations.end_cell()  # before the core forgets the calls

    def cell_facts(self) -> Sequence[Sequence[Any]]:
        return self._steps.end_cell(trains_apart=self.core.network.trains_apart)


FEATURE = FindingsFeature
