"""Runs of `inside_ddp` at full speed: some steps with the same options, and how their time was spent."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddp_notebook.lessons.ddp.inside_options import Options
from ddp_notebook.lessons.ddp.times import StepSpan, medians_ms
from ddp_notebook.observe.views import WARM_UP, settled
from ddp_notebook.records.units import size

if TYPE_CHECKING:
    from ddp_notebook import Agreement
    from ddp_notebook.display import Picture
    from ddp_notebook.lessons.ddp.driver import Numbers
    from ddp_notebook.observe.views import BucketLayout, Gradient, Step


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Run:
    """Some whole steps with the same options."""

    options: Options
    cell: int
    steps: tuple[Step, ...]  # steps of all ranks
    buckets: tuple[BucketLayout, ...]  # in the order of their synchronisation from the second step on
    first_buckets: tuple[BucketLayout, ...]  # in the first step
    gradients: Mapping[int, Gradient]  # gradients of the last step by rank: local before, mean after
    losses: Numbers
    sent_bytes: float  # recorded bytes that a rank passes to all-reduces per step
    spans: tuple[StepSpan, ...]
    agreement: Agreement

    @property
    def name(self) -> str:
        """Return a text with the options that differ from the defaults."""
        return self.options.name

    @property
    def ms(self) -> dict[str, float]:
        """Return the time of a step by part: medians over steps and ranks, without the first steps."""
        return medians_ms(self.spans, self.steps, settled(self.steps))

    def ms_of(self, rank: int) -> dict[str, float]:
        """Return the time of a step by part, for one rank."""
        return medians_ms(self.spans, self.steps, [one for one in settled(self.steps) if one.rank == rank])

    @property
    def typical(self) -> int:
        """The number of the step whose duration is nearest to the median."""
        longest: dict[int, int] = {}
        for step in self.steps:
            longest[step.step] = max(longest.get(step.step, 0), step.duration_ns)
        counted = {number: ns for number, ns in longest.items() if number >= WARM_UP} or longest
        middle = statistics.median_low(counted.values())
        return next(number for number, ns in counted.items() if ns == middle)

    def __repr__(self) -> str:
        ms = self.ms
        return (
            f"<{self.name}: {len(self.buckets)} bucket{'s' * (len(self.buckets) != 1)}, {ms['step']:.0f} ms a step, "
            f"{ms['exposed']:.0f} ms of communication exposed, {ms['waiting']:.0f} ms of waiting, "
            f"{size(self.sent_bytes)} sent>"
        )

    def picture(self) -> Picture:
        """Draw the typical step on all ranks."""
        from ddp_notebook.lessons.ddp import run_pictures

        return run_pictures.run(self)

    def layout(self) -> Picture:
        """Draw the parameters in each bucket."""
        from ddp_notebook.lessons.ddp import run_pictures

        return run_pictures.layout(self.first_buckets, self.buckets)

    def _ipython_display_(self) -> None:
        from ddp_notebook.lessons.lesson_display import show_picture

        show_picture(self.picture(), repr(self))
