"""One side of a comparison: a training run with its rows, its steps, and its name in sentences."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ddp_notebook.errors import UsageError
from ddp_notebook.observe.steps.run import TrainingRun, run_of_steps
from ddp_notebook.observe.steps.steps import StepTable, measure
from ddp_notebook.observe.tables.matching import label_of, numbers_of
from ddp_notebook.observe.tables.parts import CellPart
from ddp_notebook.observe.tables.recorded import RecordedTables
from ddp_notebook.records.schema import SPANS

MOST_BLOCKS = 10  # blocks of consecutive steps whose means are compared with each other
FEWEST_STEPS = 8  # fewer steps in the mean do not show how much a run varies by itself
_OPTIMIZER = SPANS.index("optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One training run of a comparison."""

    label: str  # "In [6]", or the file and the cell
    recording: RecordedTables
    rows: CellPart
    run: TrainingRun
    every: StepTable
    kept: StepTable  # steps in the mean of the run

    @property
    def is_thin(self) -> bool:
        """Return whether there are too few steps to measure how much the run varies by itself."""
        return len(np.unique(self.kept.number)) < FEWEST_STEPS


def cells_with_steps(recording: RecordedTables) -> list[int]:
    """Return the cells with completed optimizer steps, ascending."""
    spans = recording.rows("span")
    found: list[int] = np.unique(spans["cell"][(spans["kind"] == _OPTIMIZER) & (spans["end_ns"] >= 0)]).tolist()
    return found


def side(recording: RecordedTables, cell: int | None = None, source: str = "") -> Side:
    """Return a training run of a recording as one side of a comparison.

    Args:
        recording: the complete recording.
        cell: number of the cell; None: the last one with steps.
        source: name of the file or folder; "": the recording of this session.

    Raises:
        UsageError: the cell has no optimizer step.
    """
    cells = cells_with_steps(recording)
    where = source or "the recording"
    if not cells:
        raise UsageError(f"{where} has no optimizer step, so there is nothing to compare")
    if cell is None:
        cell = cells[-1]
    own = CellPart(recording, cell)
    every = measure(own, cell)
    of_rank = {rank: every[every.rank == rank] for rank in every.ranks}
    run = run_of_steps(
        own, cell, {rank: (one.number, one.duration_ns) for rank, one in of_rank.items()}, own.rows("call")
    )
    if run is None:
        raise UsageError(
            f"cell {cell} of {where} has no optimizer step; cells with steps: {', '.join(numbers_of(recording, cells))}"
        )
    label = label_of(recording, cell)
    if source:
        label = source if len(cells) == 1 else f"{source}, {label}"
    return Side(label=label, recording=recording, rows=own, run=run, every=every, kept=every.settled.typical)


def block_of(steps: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], int]:
    """Return the block of each step, and the number of blocks: consecutive steps, at least two in a block.

    Args:
        steps: (n,) ascending and unique.

    Example:
        >>> block_of(np.arange(5))
        (array([0, 0, 0, 1, 1]), 2)
    """
    count = min(MOST_BLOCKS, max(1, len(steps) // 2))
    return np.arange(len(steps)) * count // max(1, len(steps)), count


def variation(means: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return how much a quantity varies within a run: the difference of its halves, or twice the scatter of its blocks.

    Args:
        means: (..., k) mean of each block, NaN for a block without a value.

    Returns:
        (...) infinite if fewer than two blocks have a value.

    Example:
        >>> variation(np.array([[1.0, 1.0, 3.0, 3.0], [5.0, 5.0, 5.0, 5.0]])).round(1).tolist()
        [2.3, 0.0]
    """
    half = means.shape[-1] // 2
    if half == 0:
        return np.full(means.shape[:-1], np.inf)
    known = np.isfinite(means)
    filled = np.where(known, means, 0.0)

    def mean(part: slice) -> npt.NDArray[np.float64]:
        return filled[..., part].sum(-1) / np.maximum(known[..., part].sum(-1), 1)

    halves = np.abs(mean(slice(0, half)) - mean(slice(half, None)))
    count = known.sum(-1)
    off = np.where(known, means - mean(slice(None))[..., None], 0.0)
    scatter = np.sqrt((off**2).sum(-1) / np.maximum(count - 1, 1))
    found: npt.NDArray[np.float64] = np.where(count > 1, np.maximum(halves, 2 * scatter), np.inf)
    return found
