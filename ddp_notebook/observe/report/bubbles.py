"""Bubble of a pipeline: the idle share of its ranks' time, the part caused by the schedule, and how to reduce it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ddp_notebook.observe.steps.pipelines import pipelines
from ddp_notebook.observe.tables.matching import RowSource
from ddp_notebook.records.units import percent

_LAST = 10  # number of inspected steps
_LARGE = 0.15  # share of a step that is large enough for the verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Bubble:
    """Bubble of one pipeline: medians over its last steps."""

    schedule: str
    stages: int
    microbatches: int
    measured: float  # idle share of the ranks' time from the first action to the last, 0 to 1
    ideal: float  # the same share if messages took no time
    span_ns: float

    @property
    def lost_ns(self) -> float:
        """Idle time per step, mean of the ranks."""
        return self.measured * self.span_ns

    @property
    def _what(self) -> str:
        return f"{self.schedule} with {self.stages} stages and {self.microbatches} microbatches"

    @property
    def note(self) -> str:
        """Line of the report."""
        ideal = f"{percent(self.ideal)} would be with these actions if messages took no time"
        return f"Bubble of {self._what}: {percent(self.measured)} of the ranks' time; {ideal}"

    def loss(self, step_ns: float) -> tuple[float, str]:
        """Return the lost share of the step, and the verdict about it; 0 if it is not worth mentioning."""
        # The span begins with the first rank and ends with the last, so it can be longer than the step of a rank.
        share = self.measured * min(1.0, self.span_ns / step_ns) if step_ns else 0.0
        if share < _LARGE:
            return 0.0, ""
        return share, f"{percent(share)} of the step is the bubble of the pipeline: {self._what}"

    def suggestions(self) -> list[str]:
        """Return suggestions. With more microbatches of the same size, the duration of the schedule's bubble is
        unchanged.
        """
        if self.ideal < _LARGE:
            return []
        doubled = self.ideal / (2 - self.ideal)
        return [
            f"more microbatches: with n_microbatches={2 * self.microbatches} of the same size the schedule's own "
            f"bubble would be {percent(doubled)} instead of {percent(self.ideal)}"
        ]


def bubbles(recording: RowSource, cell: int | None) -> list[Bubble]:
    """Return the bubble of each pipeline of a cell. Return [] if the cell has no pipeline.

    Args:
        cell: number of the cell; None: the last one with a pipeline.
    """
    found = pipelines(recording, cell, last=_LAST + 1)
    found = [one for one in found if one.cell == found[-1].cell]
    of_schedule = {name: [one for one in found if one.schedule == name] for name in {one.schedule for one in found}}
    return [
        Bubble(
            schedule=name,
            stages=some[-1].stages,
            microbatches=some[-1].microbatches,
            measured=float(np.median([one.bubble for one in some])),
            ideal=float(np.median([one.ideal_bubble for one in some])),
            span_ns=float(np.median([one.span_ns for one in some])),
        )
        for name, some in ((name, steps[1:] or steps) for name, steps in sorted(of_schedule.items()))
    ]
