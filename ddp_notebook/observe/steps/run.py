"""Numbers of a training run that every display shares: label, steps, ms/step, MB of gradients.

A run is the optimizer steps of one cell. `%ddp_report`, `%ddp_status`, the monitor, its static page and data frames use
these numbers, so that they agree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ddp_notebook.observe.steps.cycles import cycles
from ddp_notebook.observe.tables.distinct import distinct
from ddp_notebook.observe.tables.matching import RowSource, label_of
from ddp_notebook.observe.tables.ring_buffer import select
from ddp_notebook.observe.views import WARM_UP
from ddp_notebook.records.schema import SPANS, Rows
from ddp_notebook.records.units import ms, size

_OPTIMIZER = SPANS.index("optimizer")
_TRIMMED = 20  # one step in this number is left out at either end of the durations
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """Numbers about the optimizer steps of one cell."""

    cell: int  # number in the recording
    label: str  # displayed name of the cell: "In [6]"; "cell 3" if the cell has no prompt
    ranks: int  # number of ranks that took steps
    steps: int  # number of steps of the rank with the most
    first: int  # number of the first step in the mean
    trimmed: int  # the mean leaves out this number of the shortest steps, and of the longest
    only: int | None  # number of the step, if the mean is over a single step
    step_ns: float  # mean duration of a step, see `definition`
    gradient_nbytes: int  # bytes that a rank synchronises per step in DDP buckets; 0 without DDP

    @property
    def per_step(self) -> str:
        """Duration of a step: "84 ms/step"."""
        return f"{ms(self.step_ns)}/step"

    @property
    def definition(self) -> str:
        """Steps and ranks that `per_step` averages, as text to show next to the number."""
        if self.only is not None:
            return f"step {self.only}" + (f", mean of {self.ranks} ranks" if self.ranks > 1 else "")
        without = f" without the {self.trimmed} shortest and {self.trimmed} longest" if self.trimmed else ""
        without = " without the shortest and the longest" if self.trimmed == 1 else without
        ranks = f", of {self.ranks} ranks" if self.ranks > 1 else ""
        return f"mean of steps {self.first} to {self.steps - 1}{without}{ranks}"

    @property
    def counted(self) -> str:
        """Number of steps: "25 steps"."""
        return f"{self.steps:,} step{'s' * (self.steps != 1)}"

    def to_json(self) -> dict[str, Any]:
        """Return the fields of the run and its formatted numbers, for a view."""
        return {**asdict(self), "per_step": self.per_step, "definition": self.definition}

    def __str__(self) -> str:
        ranks = f"{self.ranks} rank{'s' * (self.ranks != 1)}"
        gradients = f", {size(self.gradient_nbytes)} of gradients in a step" if self.gradient_nbytes else ""
        return f"{self.label}: {self.counted} on {ranks}, {self.per_step} ({self.definition}){gradients}"


def runs(recording: RowSource) -> list[TrainingRun]:
    """Return all training runs of a recording, by cell.

    Example:
        >>> from tests.observe.synthetic import simulate
        >>> print(runs(simulate(steps=22))[0])
        cell 1: 22 steps on 4 ranks, 34.5 ms/step (mean of steps 2 to 21 without the shortest and the longest, of 4 \
ranks), 4.2 MB of gradients in a step
    """
    spans, calls = recording.rows("span"), recording.rows("call")
    cells = np.unique(spans["cell"][(spans["kind"] == _OPTIMIZER) & (spans["end_ns"] >= 0)])
    found = (_run(recording, int(cell), spans, calls) for cell in cells)
    return [one for one in found if one is not None]


def run_of(recording: RowSource, cell: int | None = None) -> TrainingRun | None:
    """Return one training run; None if there is none.

    Args:
        recording: the recorded tables.
        cell: number of the cell; None: the last one with steps.
    """
    spans = recording.rows("span")
    if cell is None:
        cells = spans["cell"][(spans["kind"] == _OPTIMIZER) & (spans["end_ns"] >= 0)]
        if not len(cells):
            return None
        cell = int(cells.max())
    return _run(recording, cell, spans, recording.rows("call"))


def counted(numbers: Numbers, durations_ns: Numbers) -> tuple[Numbers, int]:
    """Return the numbers of the steps over which a mean is taken.

    The first two steps of the cell are left out, and the shortest and the longest twentieth, for example steps with a
    pause.

    The numbers are the same on all ranks, because all ranks wait when one pauses. Means of the parts of these steps add
    up to the mean of the steps. Medians would not, because a rank may wait in half of its steps.

    Args:
        numbers: (n,) numbers of the steps of all ranks, in any order. If there are only the first two steps, all count.
        durations_ns: (n,) duration of each step.

    Returns:
        The numbers, ascending, and the number of steps that were left out at either end.

    Example:
        >>> counted(np.array([0, 1, 2, 3, 4]), np.array([90, 9, 8, 70, 10]))
        (array([4]), 1)
    """
    if (later := numbers >= WARM_UP).any():
        numbers, durations_ns = numbers[later], durations_ns[later]
    first, of = distinct(numbers)
    unique = numbers[first]
    means = np.bincount(of, durations_ns) / np.bincount(of)
    odd = math.ceil(len(unique) / _TRIMMED) if len(unique) > 2 else 0
    order = np.argsort(means, kind="stable")
    return np.sort(unique[order[odd : len(unique) - odd]]), odd


def _run(recording: RowSource, cell: int, spans: Rows, calls: Rows) -> TrainingRun | None:
    of_rank = {}
    spans = select(spans, spans["cell"] == cell)
    for rank in np.unique(spans["rank"][spans["kind"] == _OPTIMIZER]).tolist():
        if (found := cycles(select(spans, spans["rank"] == rank))) is not None:
            of_rank[rank] = found.first + np.arange(len(found.ends_ns)), found.ends_ns - found.begins_ns
    return run_of_steps(recording, cell, of_rank, calls)


def run_of_steps(
    recording: RowSource, cell: int, of_rank: Mapping[int, tuple[Numbers, Numbers]], calls: Rows
) -> TrainingRun | None:
    """Return the training run with these steps, or None without steps.

    Args:
        recording: the recorded tables.
        cell: number of the cell.
        of_rank: for each rank the numbers (n,) of its steps and their durations (n,) in nanoseconds.
        calls: rows of `records.CALL`, also of other cells.
    """
    of_rank = {rank: both for rank, both in of_rank.items() if len(both[0])}
    if not of_rank:
        return None
    numbers, durations = (np.concatenate(some) for some in zip(*of_rank.values(), strict=True))
    kept, odd = counted(numbers, durations)
    later = numbers[numbers >= WARM_UP]
    means = []
    for own, lasted in of_rank.values():
        chosen = np.isin(own, kept)
        settled = own >= WARM_UP
        chosen = chosen if chosen.any() else settled if settled.any() else np.ones(len(own), bool)
        means.append(float(lasted[chosen].mean()))
    return TrainingRun(
        cell=int(cell),
        label=label_of(recording, int(cell)),
        ranks=len(of_rank),
        steps=int(numbers.max()) + 1,
        first=int((later if len(later) else numbers).min()),
        trimmed=odd,
        only=int(kept[0]) if len(kept) == 1 else None,
        step_ns=sum(means) / len(means),
        gradient_nbytes=_gradient_nbytes(calls, cell),
    )


def _gradient_nbytes(calls: Rows, cell: int) -> int:
    """Return the median over the steps and ranks that synchronised gradients; 0 if none did."""
    of_buckets = np.flatnonzero((calls["bucket"] >= 0) & (calls["cell"] == cell))
    if not len(of_buckets):
        return 0
    _, of = distinct(calls["rank"][of_buckets], calls["step"][of_buckets])
    return int(np.median(np.bincount(of, calls["nbytes_in"][of_buckets])))
