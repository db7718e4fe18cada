"""What one rank reached alone, to compare with what it reaches among the others."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from ddp_notebook.observe.steps.run import counted
from ddp_notebook.observe.views import Step, settled


def alone(steps: Sequence[Step]) -> dict[str, Any]:
    """The baseline that steps of one rank alone come to: see `Recording.baseline`.

    Args:
        steps: at least one, all of the same cell.
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
