"""The time of a cell that belongs to no step: evaluation, checkpoints, before the first step, after the last one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ddp_notebook.observe.steps.steps import StepTable
from ddp_notebook.observe.tables.matching import RowSource, Times
from ddp_notebook.records.schema import SPANS, Rows

_CELL, _EVALUATION, _CHECKPOINT = map(SPANS.index, ("cell", "evaluation", "checkpoint"))
_LOADS = [SPANS.index(kind) for kind in ("input", "workers")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """Time outside of steps: means of the ranks."""

    # From the begin of the cell to its end. While it runs, and for a script, which has no cell: to the end of its last
    # step, evaluation or checkpoint.
    cell_ns: float
    # For each activity: its name, its count on a rank (0: not counted), and its total time in ns.
    rows: tuple[tuple[str, int, float], ...]


def outside(recording: RowSource, found: StepTable) -> Outside | None:
    """Return the time of a cell outside of its steps; None if it is not known.

    Args:
        recording: rows of the cell alone.
        found: all of its steps.
    """
    spans = recording.rows("span")
    spans = spans[spans["end_ns"] >= 0]
    of_ranks = []
    for rank in found.ranks:
        own, steps = spans[spans["rank"] == rank], found[found.rank == rank]
        if int(steps.number.min()) or (steps.start_ns[1:] < steps.end_ns[:-1]).any():
            return None  # the first rows are not kept any more, or several threads step at the same time
        of_ranks.append(_of_rank(own, steps))
    if not of_ranks:
        return None
    names = list(dict.fromkeys(name for one in of_ranks for name in one if name != "cell"))
    rows = []
    for name in names:
        some = [one.get(name, (0, 0.0)) for one in of_ranks]
        rows.append((name, max(count for count, _ in some), sum(ns for _, ns in some) / len(some)))
    cell_ns = sum(one["cell"][1] for one in of_ranks) / len(of_ranks)
    return Outside(cell_ns=cell_ns, rows=tuple(row for row in rows if row[2] > 0))


def _of_rank(spans: Rows, steps: StepTable) -> dict[str, tuple[int, float]]:
    """Return the count and the total time in ns of each activity."""
    cells = spans[spans["kind"] == _CELL]
    if len(cells):
        begin_ns, end_ns = int(cells["start_ns"][0]), int(cells["end_ns"][0])
    else:
        named = spans[np.isin(spans["kind"], [_EVALUATION, _CHECKPOINT])]
        begin_ns = int(named["start_ns"].min(initial=steps.start_ns[0]))
        end_ns = int(named["end_ns"].max(initial=steps.end_ns[-1]))
    begins = np.concatenate(([begin_ns], steps.end_ns))
    ends = np.maximum(np.concatenate((steps.start_ns, [end_ns])), begins)
    checkpoints = spans[spans["kind"] == _CHECKPOINT]
    passes, loads = spans[spans["kind"] == _EVALUATION], spans[np.isin(spans["kind"], _LOADS)]
    gap_of_save, gap_of_pass = (_gap(begins, ends, some["start_ns"]) for some in (checkpoints, passes))
    left = (ends - begins).astype(np.float64)
    saved_ns = np.bincount(
        gap_of_save[gap_of_save >= 0],
        (checkpoints["end_ns"] - checkpoints["start_ns"])[gap_of_save >= 0],
        len(begins),
    )
    evaluated_ns, times = np.zeros(len(begins)), 0
    for gap in np.unique(gap_of_pass[gap_of_pass >= 0]).tolist():
        own = passes[gap_of_pass == gap]
        first, last = int(own["start_ns"].min()), int(own["end_ns"].max())
        own_loads = loads["start_ns"][(loads["start_ns"] >= begins[gap]) & (loads["start_ns"] < first)]
        first = int(own_loads.min(initial=first))
        saves = checkpoints[(checkpoints["start_ns"] >= first) & (checkpoints["start_ns"] < last)]
        evaluated_ns[gap] = max(last - first - int((saves["end_ns"] - saves["start_ns"]).sum()), 0)
        times += 1
    left = np.maximum(left - saved_ns - evaluated_ns, 0)
    return {
        "cell": (1, float(end_ns - begin_ns)),
        "evaluation": (times, float(evaluated_ns.sum())),
        "checkpoints": (int((gap_of_save >= 0).sum()), float(saved_ns.sum())),
        "before the first step": (0, float(left[0])),
        "other time between steps": (0, float(left[1:-1].sum())),
        "after the last step": (0, float(left[-1])),
    }


def _gap(begins: Times, ends: Times, at_ns: Times) -> np.ndarray:
    """Return the index of the gap that contains each of these times (n,); -1: none."""
    gap = np.searchsorted(begins, at_ns, "right") - 1
    return np.where((gap >= 0) & (at_ns < ends[np.maximum(gap, 0)]), gap, -1)
