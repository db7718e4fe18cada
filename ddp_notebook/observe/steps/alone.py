"""What one rank reached alone, to compare with what it reaches among the others."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from ddp_notebook.observe.views import Step, settled


def alone(steps: Sequence[Step]) -> dict[str, Any]:
    """The baseline that steps of one rank alone come to: see `Recording.baseline`.

    Args:
        steps: at least one, all of the same cell.
    """
    counted = settled(steps)
    step_ns = statistics.median(step.duration_ns for step in counted)
    samples = [step.samples for step in counted if step.samples is not None]
    return {
        "step_ns": step_ns,
        "samples_per_s": statistics.median(samples) / step_ns * 1e9 if samples else 0.0,
        "world_size": 1,
    }
