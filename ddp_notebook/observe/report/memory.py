"""Memory that steps give back to the system and take from it again, page by page."""

from __future__ import annotations

import mmap

import numpy as np

from ddp_notebook.observe.steps.steps import StepTable
from ddp_notebook.observe.tables.matching import RowSource
from ddp_notebook.records.schema import Rows

FAULT_NS = 1_500  # what one takes, much of it to fill the page with zeros; measured on two cores: 1.0 to 2.4 us


def page_faults(recording: RowSource, steps: StepTable, step_ns: float) -> float:
    """Page faults of a step for memory that the rank has had before, mean of the ranks.

    Ranks are looked at once a second, and the median of the seconds counts: neither a pause between two steps nor what
    is done once is a step's. 0.0 where nothing is known, and for ranks on a GPU, whose memory is not the system's.

    Args:
        steps: of one cell, of some ranks or all.
        step_ns: how long one takes.
    """
    rows = recording.rows("resource")
    rows = rows[(rows["page_faults"] > 0) & (rows["gpu_allocated_bytes"] < 0)]
    of_ranks = []
    for rank in steps.ranks:
        own = steps.rank == rank
        begin_ns, end_ns = int(steps.start_ns[own].min()), int(steps.end_ns[own].max())
        looks = rows[(rows["rank"] == rank) & (rows["time_ns"] >= begin_ns) & (rows["time_ns"] <= end_ns)]
        if len(rates := _rates(np.sort(looks, order="time_ns"))):
            of_ranks.append(float(np.median(rates)))
    return float(np.mean(of_ranks)) * step_ns if of_ranks else 0.0


def _rates(looks: Rows) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Page faults for each ns between two looks at a rank, without those of memory that it has more than before.

    Args:
        looks: (n,) rows of `RESOURCE`, in the order of time.

    Returns:
        (m,) fewer than n: a new process in the rank's place counts from 0.
    """
    faults, passed_ns = np.diff(looks["page_faults"]), np.diff(looks["time_ns"])
    grown = np.maximum(np.diff(looks["rss_bytes"]), 0) / mmap.PAGESIZE
    same = (faults >= 0) & (passed_ns > 0)
    return np.maximum(faults - grown, 0.0)[same] / passed_ns[same]
