"""Feature of a rank that collects facts about its training steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddp_notebook.messages.ranks import RunCell
from ddp_notebook.rank.findings.steps import StepFacts
from ddp_notebook.rank.hooks import Core, Feature


class FindingsFeature(Feature):
    """Facts about the training steps of each cell. The recording must be on, since it observes the steps."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._steps: StepFacts | None = None
        if core.recording is not None:
            training = core.recording.training
            self._steps = StepFacts(training, core.network.recorder, lambda: core.shell.user_ns)
            training.observe(self._steps)

    def cell_begins(self, cell: RunCell) -> None:
        if self._steps is not None:
            self._steps.begin_cell()

    def cell_facts(self) -> Sequence[Sequence[Any]]:
        return () if self._steps is None else self._steps.end_cell(trains_apart=self.core.network.trains_apart)


FEATURE = FindingsFeature
