"""Time of a cell: its steps, evaluation, checkpoints, before the first step, after the last one.

The rows add up to the time of the cell.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ddp_notebook.observe.steps.steps import StepTable
from ddp_notebook.observe.tables.matching import Numbers, RowSource, Times
from ddp_notebook.observe.tables.ring_buffer import select
from ddp_notebook.records.schema import SPANS, Rows

_CELL, _FORWARD, _EVALUATION, _CHECKPOINT, _WORKERS = map(
    SPANS.index, ("cell", "forward", "evaluation", "checkpoint", "workers")
)
_BACKWARDS = [SPANS.index(kind) for kind in ("backward", "input gradient", "weight gradient")]
_LOADS = [SPANS.index(kind) for kind in ("input", "workers")]
_OF_WORKERS = "start and end of workers"
WORKERS_OUTSIDE = "workers outside of steps"
Row = tuple[str, int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """Time of a cell in its steps and outside of them: means of the ranks."""

    # From the begin of the cell to its end. For a running cell, and for a script, to the end of its last step,
    # evaluation or checkpoint.
    cell_ns: float
    # For each activity outside of steps: name, count on a rank (0: not counted), total time in ns.
    rows: tuple[Row, ...]
    steps: tuple[Row, ...]  # the same for steps; an indented row is a part of the row above

    @property
    def whole_ns(self) -> tuple[float, ...]:
        """Times that add up to `cell_ns`."""
        return tuple(ns for name, _, ns in (*self.steps, *self.rows) if not name.startswith(" "))


def outside(recording: RowSource, found: StepTable, in_mean: Numbers) -> Outside | None:
    """Return the time of a cell in its steps and outside of them; None if it is not known.

    Args:
        recording: rows of the cell alone.
        found: all of its steps.
        in_mean: numbers of the steps in the mean of the run.
    """
    spans = recording.rows("span")
    spans = select(spans, spans["end_ns"] >= 0)
    of_ranks = []
    for rank in found.ranks:
        own, steps = select(spans, spans["rank"] == rank), found[found.rank == rank]
        if int(steps.number.min()) or (steps.start_ns[1:] < steps.end_ns[:-1]).any():
            return None  # the first rows were dropped, or several threads step at the same time
        of_ranks.append(_of_rank(own, steps))
    if not of_ranks:
        return None
    saves = spans[spans["kind"] == _CHECKPOINT]
    rows = []
    for name in of_ranks[0]:
        some = [one[name] for one in of_ranks]
        rows.append((name, max(count for count, _ in some), sum(ns for _, ns in some) / len(some)))
    (_, _, cell_ns), *rows = rows
    return Outside(
        cell_ns=cell_ns, rows=tuple(row for row in rows if row[2] > 0), steps=_of_steps(found, in_mean, saves)
    )


def _of_steps(found: StepTable, in_mean: Numbers, saves: Rows) -> tuple[Row, ...]:
    """Return the rows of the steps in the mean of the run, and of the others, each with its parts."""
    is_in_mean, rows = np.isin(found.number, in_mean), list[Row]()
    saves_ns, counts = np.zeros(len(found), np.int64), np.zeros(len(found), np.int64)
    for rank in found.ranks if len(saves) else ():
        steps, own = np.flatnonzero(found.rank == rank), saves[saves["rank"] == rank]
        at = _gap(found.start_ns[steps], found.end_ns[steps], own["start_ns"])
        np.add.at(saves_ns, steps[at[at >= 0]], (own["end_ns"] - own["start_ns"])[at >= 0])
        np.add.at(counts, steps[at[at >= 0]], 1)
    workers_ns = found.parts["workers"]
    for name, chosen in (("steps in the mean", is_in_mean), ("steps not in the mean", ~is_in_mean)):
        for row, times, ns in (
            (name, np.ones(len(found), np.int64), found.duration_ns),
            (f"  {_OF_WORKERS}", workers_ns > 0, workers_ns),
            ("  checkpoints", counts, saves_ns),
        ):
            if (count := int(np.bincount(found.rank[chosen], times[chosen]).max(initial=0))) > 0:
                rows.append((row, count, int(ns[chosen].sum()) / len(found.ranks)))
    return tuple(rows)


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
    saves = _inside(spans[spans["kind"] == _CHECKPOINT], begins, ends)
    gap_of_save = _gap(begins, ends, saves["start_ns"])
    evaluations = _evaluations(spans, saves, begins, ends)
    workers = _inside(spans[spans["kind"] == _WORKERS], begins, ends)
    for first, last, _, _ in evaluations:
        workers = workers[(workers["start_ns"] < first) | (workers["start_ns"] >= last)]
    gap_of_workers = _gap(begins, ends, workers["start_ns"])
    taken = np.zeros(len(begins))
    for some, gap in ((saves, gap_of_save), (workers, gap_of_workers)):
        taken += np.bincount(gap, some["end_ns"] - some["start_ns"], len(begins))
    for _, _, gap_of_one, ns in evaluations:
        taken[gap_of_one] += ns
    left = np.maximum((ends - begins) - taken, 0)
    return {
        "cell": (1, float(end_ns - begin_ns)),
        "evaluation": (len(evaluations), float(sum(ns for *_, ns in evaluations))),
        "checkpoints": (len(saves), float((saves["end_ns"] - saves["start_ns"]).sum())),
        WORKERS_OUTSIDE: (len(np.unique(gap_of_workers)), float((workers["end_ns"] - workers["start_ns"]).sum())),
        "before the first step": (0, float(left[0])),
        "other time between steps": (0, float(left[1:-1].sum())),
        "after the last step": (0, float(left[-1])),
    }


def _evaluations(spans: Rows, saves: Rows, begins: Times, ends: Times) -> list[tuple[int, int, int, int]]:
    """Return the evaluation in each gap between steps that has one.

    A tuple contains its begin and end, the index of the gap, and its time in ns without checkpoints that it saves. It
    begins with the first load of the DataLoader that feeds its first forward pass, and includes the end of the loader's
    workers.
    """
    loads, found = spans[np.isin(spans["kind"], _LOADS)], []
    is_pass = (spans["kind"] == _EVALUATION) | ((spans["kind"] == _FORWARD) & ~spans["is_training"])
    passes, backwards = spans[is_pass], spans["start_ns"][np.isin(spans["kind"], _BACKWARDS)]
    gap_of_pass = _gap(begins, ends, passes["start_ns"])
    # Exclude a step that the program has not ended: its forward passes are in the last gap, and have a backward pass.
    trains = (passes["kind"] == _FORWARD) & (passes["start_ns"] < backwards.max(initial=-1))
    gap_of_pass[trains & (gap_of_pass == len(begins) - 1)] = -1
    for gap in np.unique(gap_of_pass[gap_of_pass >= 0]).tolist():
        own = passes[gap_of_pass == gap]
        first, last = int(own["start_ns"].min()), int(own["end_ns"].max())
        before = loads[(loads["start_ns"] >= begins[gap]) & (loads["start_ns"] < first)]
        if len(before):
            name = before["name"][before["start_ns"].argmax()]
            first = int(before["start_ns"][before["name"] == name].min())
            its = loads[(loads["name"] == name) & (loads["start_ns"] >= first) & (loads["end_ns"] <= ends[gap])]
            last = max(last, int(its["end_ns"].max()))
        inside = saves[(saves["start_ns"] >= first) & (saves["start_ns"] < last)]
        found.append((first, last, gap, max(last - first - int((inside["end_ns"] - inside["start_ns"]).sum()), 0)))
    return found


def _inside(spans: Rows, begins: Times, ends: Times) -> Rows:
    """Return the spans that begin in a gap, truncated at its end."""
    gap = _gap(begins, ends, spans["start_ns"])
    found = spans[gap >= 0].copy()
    found["end_ns"] = np.minimum(found["end_ns"], ends[gap[gap >= 0]])
    return found


def _gap(begins: Times, ends: Times, at_ns: Times) -> np.ndarray:
    """Return the index of the gap that contains each of these times (n,); -1: none."""
    gap = np.searchsorted(begins, at_ns, "right") - 1
    return np.where((gap >= 0) & (at_ns < ends[np.maximum(gap, 0)]), gap, -1)
