"""DDP from the inside: a training step of a real model on the running ranks, one stage at a time or at full speed.

    ddp = lessons.inside_ddp(bucket_cap_mb=1)
    ddp.step()                    # 1 construction; then 2 forward, 3 backward, 4 all-reduce of each bucket, 5 optimizer
    ddp.run(comm_hook="fp16")     # some whole steps with a changed option, and their timeline
    ddp.compare()                 # all runs so far, one below the other
    ddp.sliders()                 # interactive controls

All numbers come from the ranks: their variables (`session[...]`), their recording (`session.recording`), and
comparisons between ranks (`session.check`).
"""

from __future__ import annotations

import statistics
import textwrap
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ddp_notebook.errors import UsageError
from ddp_notebook.lessons.ddp.driver import Driver
from ddp_notebook.lessons.ddp.inside_options import Options
from ddp_notebook.lessons.ddp.runs import Run
from ddp_notebook.lessons.ddp.stages import Stage, Stages
from ddp_notebook.lessons.ddp.times import StepSpan
from ddp_notebook.lessons.lesson_cells import running
from ddp_notebook.observe.views import WARM_UP
from ddp_notebook.records.schema import SPANS

if TYPE_CHECKING:
    from ddp_notebook import Session
    from ddp_notebook.display import Picture

_NAME = 38  # characters of a run's name in a line of the table; a line of JupyterLab has about 100


def inside_ddp(model: str | None = None, *, session: Session | None = None, **options: Any) -> InsideDDP:
    """Watch `DistributedDataParallel` at work on the running ranks, on scikit-learn's handwritten digits.

    Args:
        model: Python expression that creates a module on each rank, such as "nn.Sequential(nn.Linear(64, 10))". It maps
            (B, 64) images to (B, 10) logits. None for four linear layers with 0.9 M parameters.
        session: Session to use; None for the current one.
        options: Any of these keyword arguments:

            - bucket_cap_mb (25), gradient_as_bucket_view, static_graph, find_unused_parameters (False): as in
              `DistributedDataParallel`.
            - no_sync (0): number of backward passes in `no_sync()` before each one that synchronises.
            - comm_hook (None): "fp16", "bf16" or "powersgd" of torch; None for the all-reduce of DDP.
            - powersgd_rank (2): rank of the PowerSGD approximation.
            - straggler (None): this rank sleeps for straggler_ms (30) before each forward.
            - link_mb_s (None): speed of a simulated slow network, in 1e6 bytes per second. Each bucket is all-reduced
              for real, and occupies a link of this speed for 2 (N - 1) / N of its bytes, one bucket after the other.
            - compute_ms (None): simulated duration of a backward in milliseconds. A forward takes half of it. Each
              layer sleeps for its share, so that more ranks than cores do not compete for cores. The batch has 8
              images instead of 256, so that the real computation takes little time.
            - unused (False): add a layer that does not contribute to the loss.
            - parameter (None): parameter whose gradient is shown; None for the last one of the model.

    Raises:
        NoSessionError: No ranks are running.
        UsageError: There is no such option, or its value is invalid.

    Example:
        >>> ddp = lessons.inside_ddp(bucket_cap_mb=1)
        >>> ddp.run().buckets[0].parameters
        ('last.bias', 'last.weight', 'third.bias', 'third.weight')

    Source: https://docs.pytorch.org/docs/stable/notes/ddp.html (internal design)
    """
    return InsideDDP(model, options, session)


class InsideDDP:
    """See `inside_ddp`."""

    def __init__(self, model: str | None, options: Mapping[str, Any], session: Session | None = None) -> None:
        self._session = found = running(session)
        self.options = Options().changed(options, found.world_size)
        self.runs: list[Run] = []
        self._driver = Driver(found, model)
        self._stages = Stages(self._driver, self.options)

    def __repr__(self) -> str:
        at = f"after {self.stages[-1]!r}" if self.stages else "before its first stage"
        return f"<InsideDDP on {self._session.world_size} ranks: {at}, {len(self.runs)} runs>"

    # ---- one stage at a time

    @property
    def stages(self) -> list[Stage]:
        """Return the finished stages."""
        return self._stages.done

    def step(self) -> Stage:
        """Run the next stage. An all-reduce stage handles one bucket."""
        return self._stages.next()

    def play(self) -> list[Stage]:
        """Run all stages up to the end of this training step."""
        before = len(self.stages)
        while self.step().number != 5:
            pass
        return self.stages[before:]

    # ---- at speed

    def run(self, steps: int = 8, **changes: Any) -> Run:
        """Run some whole steps of a new model on the ranks, with changed options.

        Args:
            steps: Number of steps.
            changes: Options of `inside_ddp`.

        Raises:
            UsageError: There is no such option, or its value is invalid.
            RankError: The options do not fit the model; contains the error of torch.
        """
        options = self.options.changed(changes, self._session.world_size)
        self._driver.make(options)
        began = time.monotonic_ns()  # layouts do not have a cell number
        self._driver.train(int(steps))
        recording = self._session.recording
        cell = recording.steps(rank=0)[-1].cell
        layouts = [one for one in recording.layouts if one.rank == 0 and one.time_ns >= began]
        calls = recording.collectives(op="all_reduce", rank=0, cell=cell)
        spans = recording.rows("span")
        own = [step for step in recording.steps(cell=cell, rank=0) if step.step >= WARM_UP]
        starts = [step.start_ns for step in own] or [began]
        found = Run(
            options=options,
            cell=cell,
            steps=tuple(recording.steps(cell=cell)),
            buckets=layouts[-1].buckets if layouts else (),
            first_buckets=layouts[0].buckets if layouts else (),
            gradients={one.rank: one for one in recording.gradients(self._driver.parameter) if one.cell == cell},
            losses={rank: one["losses"] for rank, one in self._driver.found().items()},
            sent_bytes=sum(one.nbytes_in for one in calls if one.issue_ns >= starts[0]) / len(starts),
            spans=tuple(
                StepSpan(int(row["rank"]), int(row["start_ns"]), int(row["end_ns"]), SPANS[row["kind"]])
                for row in spans[(spans["cell"] == cell) & (spans["end_ns"] >= 0)]
                if SPANS[row["kind"]] in ("forward", "backward", "optimizer")
            ),
            agreement=self._driver.check_weights(),
        )
        self.runs.append(found)
        return found

    def compare(self, *runs: Run) -> Picture:
        """Draw a typical step of each run on rank 0, one below the other on a common time axis.

        Args:
            runs: Runs to draw; all if empty.
        """
        from ddp_notebook.lessons.ddp import run_pictures

        if not (chosen := runs or tuple(self.runs)):
            raise UsageError("no runs to compare: call run() first")
        return run_pictures.compare(chosen)

    def table(self, *runs: Run) -> str:
        """Return a text table of the step times of each run. A long name of a run takes several lines."""
        rows: list[tuple[str, ...]] = [("", "buckets", "MB sent", "step ms", "compute", "exposed", "waiting", "loss")]
        for run in runs or self.runs:
            ms = run.ms
            loss = statistics.mean(losses[-1] for losses in run.losses.values())
            parts = [f"{ms[part]:.1f}" for part in ("step", "compute", "exposed", "waiting")]
            name, *more = textwrap.wrap(run.name, _NAME, subsequent_indent="  ") or [""]
            rows.append((name, str(len(run.buckets)), f"{run.sent_bytes / 1e6:.2f}", *parts, f"{loss:.3f}"))
            rows += [(line, *[""] * (len(rows[0]) - 1)) for line in more]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return "\n".join(
            "  ".join(
                one.ljust(width) if not at else one.rjust(width)
                for at, (one, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        )

    def sliders(self) -> None:
        """Show the options as sliders. Each change starts a new run on the ranks and updates the picture."""
        from ddp_notebook.lessons.ddp.sliders import DDPSliders

        DDPSliders(self, self._session).show()
