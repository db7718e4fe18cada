"""Baseline of one rank: the last training cell again, on rank 0, without communication."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ddp_notebook.errors import RankError, UsageError
from ddp_notebook.messages.record_options import RecordOptions
from ddp_notebook.observe.steps.run import counted
from ddp_notebook.observe.views import Step, settled
from ddp_notebook.run.cells.cells import Cells
from ddp_notebook.run.record.recordings import Recordings


def alone(steps: Sequence[Step]) -> dict[str, Any]:
    """Compute the baseline from steps of one rank alone: see `Recording.baseline`.

    Args:
        steps: at least one; all of the same cell.
    """
    numbers, lasted = (np.array(some) for some in zip(*((one.step, one.duration_ns) for one in steps), strict=True))
    kept, _ = counted(numbers, lasted)
    step_ns = float(lasted[np.isin(numbers, kept)].mean())
    samples = [step.samples for step in settled(steps) if step.samples is not None]
    return {
        "step_ns": step_ns,
        "samples_per_s": statistics.median(samples) / step_ns * 1e9 if samples else 0.0,
        "world_size": 1,
    }


_ENDED = "EnoughStepsError"  # raised on a rank to end the cell, see `rank.record.solo`


def measure(
    recordings: Recordings,
    cells: Cells,
    run: Callable[[str, RecordOptions, float], object],
    steps: int,
    seconds: float,
) -> None:
    """Measure the baseline, and store it in the recording. See `Session.baseline`.

    Args:
        run: runs code on rank 0; its arguments are the code, the recording options and the time limit in seconds.
    """
    trained = max((step.cell for step in recordings.now.steps(rank=0)), default=0)
    code = cells.code_of(trained)
    if code is None:
        raise UsageError("no cell has run an optimizer step on rank 0: run the training cell first")
    try:
        run(code, RecordOptions(solo=(steps, seconds), level="meta"), 2 * seconds + 20)
    except RankError as error:
        if error.result is None or error.result[0].ename != _ENDED:
            raise
    finally:
        recording = recordings.now
        taken = [step for step in recording.steps(rank=0) if step.cell > trained]
        if taken:
            recording._set_aside(taken[0].cell)
    if not taken:
        raise UsageError("the cell ran no optimizer step when it ran on rank 0 alone")
    recording.baseline = {"cell": trained, **alone(taken)}
