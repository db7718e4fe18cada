"""A pipeline on the running ranks: run with any schedule of torch's, guessed before, measured after.

    pipe = lessons.pipeline()
    pipe.run("GPipe", microbatches=8, guess=0.3)     # the measured chart above the one without messages
    pipe.table()                                     # all runs so far below each other
    pipe.sliders()                                   # the same by hand

Every rank has a stage, or two. Their time is slept, so that more ranks than cores do not wait for cores; what is
computed, sent and recorded is real.
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
    """Cut a model over the running ranks, and see who computes when.

    Args:
        session: None: the current one.

    Raises:
        NoSessionError: no ranks are running.

    Example:
        >>> pipe = lessons.pipeline()
        >>> run = pipe.run("GPipe", microbatches=4, guess=0.2)
        >>> run.is_same, run.in_flight
        (True, {0: 4, 1: 4})
    """
    return PipelineLesson(session)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PipelineRun:
    """A step of a schedule with so many microbatches, on the ranks."""

    schedule: str
    microbatches: int
    measured: Pipeline
    guess: float | None  # of the bubble, 0 to 1; None: nobody has guessed
    loss: float
    is_same: bool  # the gradients are those that one process computes
    figure: Figure

    @property
    def bubble(self) -> float:
        """Measured: the share of the ranks' time that no action fills."""
        return self.measured.bubble

    @property
    def ideal(self) -> float:
        """The same if messages took no time."""
        return self.measured.ideal_bubble

    @property
    def even(self) -> float:
        """The same if besides each forward took one unit of time and each backward two: of the schedule alone."""
        return self.measured.even_bubble

    @property
    def in_flight(self) -> dict[int, int]:
        """By rank: the most microbatches whose activations it has kept at once, of all its stages."""
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
        """The measured chart above the one without messages."""
        return self.figure

    def _ipython_display_(self) -> None:
        from IPython.display import display

        print(self)
        display(self.figure)  # type: ignore[no-untyped-call,unused-ignore]


class PipelineLesson:
    """See `pipeline`."""

    def __init__(self, session: Session | None = None) -> None:
        self._runner = LessonRunner(running(session))
        self.runs: list[PipelineRun] = []

    @property
    def session(self) -> Session:
        """Where it runs."""
        return self._runner.session

    def __repr__(self) -> str:
        return f"<PipelineLesson on {self.session.world_size} ranks: {len(self.runs)} runs>"

    def run(
        self, schedule: str = "1F1B", microbatches: int = 8, guess: float | None = None, stage_ms: float = STAGE_MS
    ) -> PipelineRun:
        """Make some steps on the ranks, and measure one of typical length.

        Args:
            schedule: of `schedules.SCHEDULES`: "GPipe", "1F1B", "Interleaved1F1B", ...
            microbatches: into which the batch is cut, 1 to 32; each has 4 samples.
            guess: of the bubble, 0 to 1.
            stage_ms: what the forwards of a rank's stages take together, for each microbatch; a backward takes twice
                that. It is slept.

        Raises:
            UsageError: there is no such schedule, or a number cannot be.
            RankError: what torch says of numbers that a schedule does not take.
        """
        if schedule not in SCHEDULES:
            raise UsageError(f"there is no schedule {schedule!r}; there are {', '.join(SCHEDULES)}")
        if not 1 <= microbatches <= MOST_MICROBATCHES:
            raise UsageError(f"{microbatches} microbatches: take 1 to {MOST_MICROBATCHES}")
        if guess is not None and not 0 <= guess <= 1:
            raise UsageError(f"a guess of {guess:g}: a bubble is a share of the time, 0 to 1")
        if not 0 <= stage_ms <= 100:
            raise UsageError(f"stage_ms={stage_ms:g}: take 0 to 100")
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
        """All runs, in text."""
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
        """Show schedule, microbatches and a guess as controls: the button runs it on the ranks."""

        from ddp_notebook.lessons.pipelines.pipeline_sliders import PipelineSliders

        PipelineSliders(self).show()


def formula(stages: int, microbatches: int) -> float:
    """The bubble of GPipe and of 1F1B where all stages take the same time.

    Args:
        stages: a rank each, at least 1.
        microbatches: at least 1.

    Example:
        >>> formula(stages=4, microbatches=8)
        0.2727272727272727

    Source: https://arxiv.org/abs/2104.04473, section 2.2.1.
    """
    return (stages - 1) / (microbatches + stages - 1)
