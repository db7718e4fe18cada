"""Memory that steps give back to the system and take from it again, page by page."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ddp_notebook.observe.tables.matching import RowSource
from ddp_notebook.observe.views import Step

FAULT_NS = 1_500  # what one takes, much of it to fill the page with zeros; measured on two cores: 1.0 to 2.4 us


def page_faults(recording: RowSource, steps: Sequence[Step]) -> float:
    """Page faults of a step without those that had to read a disk, mean of the ranks.

    0.0 where that is not known: ranks are looked at once a second, so it takes steps of two seconds. It is no more than
    that of ranks that have a GPU, whose memory is not the system's.

    Args:
        steps: of one cell, of some ranks or all.
    """
    rows = recording.rows("resource")
    rows = rows[(rows["page_faults"] > 0) & (rows["gpu_allocated_bytes"] < 0)]
    of_ranks = []
    for rank in {step.rank for step in steps}:
        own = [step for step in steps if step.rank == rank]
        begin_ns, end_ns = min(step.start_ns for step in own), max(step.end_ns for step in own)
        looks = rows[(rows["rank"] == rank) & (rows["time_ns"] >= begin_ns) & (rows["time_ns"] <= end_ns)]
        if len(looks) < 2:
            return 0.0
        faults, passed_ns = (float(np.ptp(looks[column])) for column in ("page_faults", "time_ns"))
        of_ranks.append(faults / passed_ns * sum(step.duration_ns for step in own) / len(own))
    return float(np.mean(of_ranks)) if of_ranks else 0.0
