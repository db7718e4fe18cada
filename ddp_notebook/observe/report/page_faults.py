"""Memory that steps release to the system and request again, page by page."""

from __future__ import annotations

import mmap

import numpy as np

from ddp_notebook.observe.steps.steps import StepTable
from ddp_notebook.observe.tables.matching import RowSource
from ddp_notebook.records.schema import Rows

FAULT_NS = 1_500  # cost of a page fault, mostly for zeroing the page; measured on two cores: 1.0 to 2.4 us


def page_faults(recording: RowSource, steps: StepTable, step_ns: float) -> float:
    """Return the page faults per step for memory that the rank had before, mean of the ranks.

    Ranks are sampled once per second, and the median over the seconds counts. So pauses between steps and one-time work
    are excluded. The result is 0.0 if nothing is known, and for ranks on a GPU, whose memory does not come from the
    system.

    Args:
        recording: source of `RESOURCE` rows.
        steps: steps of one cell, of some or all ranks.
        step_ns: duration of a step.
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
    """Return page faults per ns between two samples of a rank, except those of memory growth.

    Args:
        looks: (n,) rows of `RESOURCE`, in order of time.

    Returns:
        (m,) fewer than n: a new process of the rank counts from 0.
    """
    faults, passed_ns = np.diff(looks["page_faults"]), np.diff(looks["time_ns"])
    grown = np.maximum(np.diff(looks["rss_bytes"]), 0) / mmap.PAGESIZE
    same = (faults >= 0) & (passed_ns > 0)
    return np.maximum(faults - grown, 0.0)[same] / passed_ns[same]
