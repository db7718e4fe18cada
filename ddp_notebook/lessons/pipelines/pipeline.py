"""A pipeline on the running ranks: guess its bubble, run it with any schedule of torch, measure it.

    pipe = lessons.pipeline()
    pipe.run("GPipe", microbatches=8, guess=0.3)     # the measured chart above the one without message times
    pipe.table()                                     # all runs so far
    pipe.sliders()                                   # interactive controls

Every rank has one or two stages. Stages sleep instead of computing, so that more ranks than cores do not compete for
cores. Results, messages and recordings are real.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddp_notebook.errors import UsageError
from ddp_notebook.lessons.lesson_cells import RUN_S, LessonRunner, running
from ddp_notebook.lessons.pipelines.schedules import MOST_MICROBATCHES, SCHEDULES, STAGE_MS
from ddp_notebook.records.units import ms, percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ddp_notebook.observe.views import Pipeline
    from ddp_notebook.session import Session


def pipeline(session: Session | None = None) -> PipelineLesson:
    """Divide a model over the running ranks, and show when each rank computes.

    Args:
        session: Session to use; None for the current one.

    Raises:
        NoSessionError: No ranks are running.

    Example:
        >>> pipe = lessons.pipeline()
        >>> run = pipe.run("GPipe", microbatches=4, guess=0.2)
        >>> run.is_same, run.in_flight
        (True, {0: 4, 1: 4})
    """
    return PipelineLesson(session)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PipelineRun:
    """A step of a schedule on the ranks."""

    schedule: str
    microbatches: int
    measured: Pipeline
    guess: float | None  # guessed bubble, 0 to 1; None without a guess
    loss: float
    is_same: bool  # the gradients equal those of a single process
    figure: Figure

    @property
    def bubble(self) -> float:
        """Return the measured bubble: the share of the ranks' time without an action."""
        return self.measured.bubble

    @property
    def ideal(self) -> float:
        """Return the bubble without the time of messages."""
        return self.measured.ideal_bubble

    @property
    def even(self) -> float:
        """Return the bubble of the schedule alone: without messages, one time unit per forward and two per backward."""
        return self.measured.even_bubble

    @property
    def in_flight(self) -> dict[int, int]:
        """Return by rank the largest number of microbatches whose activations it kept at once, of all its stages."""
        most = dict.fromkeys(self.measured.ranks, 0)
        for rank in most:
            kept = 0
            for one in sorted(self.measured.actions, key=lambda one: one.end_ns):
                if one.rank == rank:
                    kept += {"forward": 1, "backward": -1, "weight gradient": -1}.get(one.kind, 0)
                    most[rank] = max(most[rank], kept)
        return most

    @property
    def name(self) -> str:
        return f"{self.schedule}, {self.microbatches} microbatch{'es' * (self.microbatches != 1)}"

    def __repr__(self) -> str:
        words = f"bubble {percent(self.bubble)}, {percent(self.ideal)} if messages took no time"
        if self.guess is not None:
            words += f"; guessed {percent(self.guess)}, {abs(self.guess - self.bubble) * 100:.0f} points off"
        same = "gradients as in one process" if self.is_same else "gradients DIFFER from those of one process"
        return f"<{self.name}: {words}; {same}>"

    def picture(self) -> Figure:
        """Return the measured chart above the one without message times."""
        return self.figure

    def _ipython_display_(self) -> None:
        from ddp_notebook.lessons.lesson_display import show_picture

        show_picture(self.figure, repr(self))


class PipelineLesson:
    """See `pipeline`."""

    def __init__(self, session: Session | None = None) -> None:
        self._runner = LessonRunner(running(session))
        self.runs: list[PipelineRun] = []

    @property
    def session(self) -> Session:
        """Return the session of the lesson."""
        return self._runner.session

    def __repr__(self) -> str:
        return f"<PipelineLesson on {self.session.world_size} ranks: {len(self.runs)} runs>"

    def run(
        self, schedule: str = "1F1B", microbatches: int = 8, guess: float | None = None, stage_ms: float = STAGE_MS
    ) -> PipelineRun:
        """Run some steps on the ranks, and measure one of typical length.

        Args:
            schedule: One of `schedules.SCHEDULES`: "GPipe", "1F1B", "Interleaved1F1B", ...
            microbatches: Number of microbatches, 1 to 32, with 4 samples each.
            guess: Guess of the bubble, 0 to 1.
            stage_ms: Time of the forwards of a rank's stages together, for each microbatch. A backward takes twice as
                long. Stages sleep for this time.

        Raises:
            UsageError: There is no such schedule, or a number is out of range.
            RankError: torch does not accept the numbers for this schedule.
        """
        if schedule not in SCHEDULES:
            raise UsageError(f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}")
        if not 1 <= microbatches <= MOST_MICROBATCHES:
            raise UsageError(f"microbatches must be 1 to {MOST_MICROBATCHES}, got {microbatches}")
        if guess is not None and not 0 <= guess <= 1:
            raise UsageError(f"guess must be a share of the time from 0 to 1, got {guess:g}")
        if not 0 <= stage_ms <= 100:
            raise UsageError(f"stage_ms must be 0 to 100, got {stage_ms:g}")
        name, places = SCHEDULES[schedule]
        several = places.count(",") + 1
        told = self._runner.ask(
            "from ddp_notebook.lessons.pipelines import ranks as _lesson_pipeline\n"
            f"_lesson_told = _lesson_pipeline.train({name!r}, {places}, {several} * world_size, {microbatches}, "
            f"{stage_ms / several}, device)",
            timeout_s=RUN_S,
            level="meta",
        )
        recording = self.session.recording
        measured = recording.pipeline()
        found = PipelineRun(
            schedule=schedule,
            microbatches=microbatches,
            measured=measured,
            guess=guess,
            loss=next(one["loss"] for one in told.values() if one["loss"] is not None),
            is_same=all(one["is_same"] for one in told.values()),
            figure=recording.plot.pipeline(measured.cell, measured.step),
        )
        self.runs.append(found)
        return found

    def table(self) -> str:
        """Return a text table of all runs."""
        head = ("", "step", "bubble", "without messages", "guess", "kept at once")
        rows: list[tuple[str, ...]] = [head]
        for run in self.runs:
            guess = "" if run.guess is None else percent(run.guess)
            kept = ", ".join(map(str, run.in_flight.values()))
            rows.append((run.name, ms(run.measured.span_ns), percent(run.bubble), percent(run.ideal), guess, kept))
        widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
        return "\n".join(
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows
        )

    def sliders(self) -> None:
        """Show controls for the schedule, the microbatches and a guess. A button starts the run on the ranks."""

        from ddp_notebook.lessons.pipelines.pipeline_sliders import PipelineSliders

        PipelineSliders(self).show()


def formula(stages: int, microbatches: int) -> float:
    """Return the bubble of GPipe and 1F1B if all stages take the same time.

    Args:
        stages: Number of stages, one per rank, at least 1.
        microbatches: At least 1.

    Example:
        >>> formula(stages=4, microbatches=8)
        0.2727272727272727

    Source: https://arxiv.org/abs/2104.04473, section 2.2.1.
    """
    return (stages - 1) / (microbatches + stages - 1)
