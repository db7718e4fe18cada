"""Values of the tensors of simulated calls: the first elements, and the range of the others."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from ddp_notebook.records.schema import FIRST_BYTES, SAMPLE_OF_LARGE, Rows
from ddp_notebook.widgets.simulated.rows import RowMaker
from ddp_notebook.widgets.simulated.schedule import StepTimes, Times
from ddp_notebook.widgets.simulated.shape import BUCKETS, Shape
from ddp_notebook.widgets.simulated.simulated_calls import SimulatedCalls

_FIRST = FIRST_BYTES // 4  # float32 elements of a tensor that are shown
Floats = npt.NDArray[np.float64]


class ValueMaker:
    """Draws the tensor values of one training run.

    Args:
        shape: Parameters of the simulation.
        make: Creates rows.
        elements: (BUCKETS,) Elements of each bucket.
        random: Source of the values.
    """

    def __init__(self, shape: Shape, make: RowMaker, elements: Times, random: np.random.Generator) -> None:
        self._shape = shape
        self._make = make
        self._elements = elements
        self._random = random

    def values(self, times: StepTimes, calls: SimulatedCalls, steps_before: int) -> Rows:
        """Return (world_size, n) rows of `records.VALUE` of these calls.

        Args:
            times: Times of the steps.
            calls: Calls of these steps.
            steps_before: Steps of the training run before the cell of these steps.
        """
        parts = [
            self._gradients(times, calls.ddp),
            self._counts(calls.sums, steps_before),
            self._passed(calls.messages),
        ]
        return np.concatenate(parts, axis=1)

    def _gradients(self, times: StepTimes, calls: Rows) -> Rows:
        """Return the gradients of each bucket: the share of every rank (DDP divides before it sums), and the sum."""
        world, count = self._shape.world_size, len(times.numbers)
        size = (0.02 * np.exp(-times.numbers / self._shape.course) + 0.002) / world  # (count,)
        shares = self._random.standard_normal((world, count, BUCKETS, _FIRST), np.float32)
        shares *= size.astype("f4")[:, None, None]
        sums = shares.sum(axis=0, dtype=np.float32)
        bad = np.zeros((world, count), bool)
        if self._shape.nan_at is not None:
            rank, step = self._shape.nan_at
            bad[rank, times.numbers == step] = True
            bad[:, times.numbers > step] = True
        shares[bad] = np.nan
        sums[bad.any(axis=0)] = np.nan
        rows = self._make.rows("value", count * BUCKETS * 2, dtype="float32").reshape(world, count, BUCKETS, 2)
        rows["call"], rows["side"] = calls["call"][..., None], [0, 1]
        rows["numel"], rows["looked_at"] = self._elements[:, None], SAMPLE_OF_LARGE
        spread = np.stack([size, size * math.sqrt(world)], axis=1)[:, None]  # (count, 1, 2)
        for side, first in enumerate((shares, np.broadcast_to(sums, shares.shape))):
            part = rows[..., side]
            self._look(part, first, spread[..., side])
        return rows.reshape(world, -1)

    def _look(self, rows: Rows, first: npt.NDArray[np.float32], spread: Floats) -> None:
        """Set the range of a tensor with these first elements. The others have the standard deviation `spread`."""
        rows["first"] = np.ascontiguousarray(first).view(f"V{FIRST_BYTES}")[..., 0]
        rows["first_count"] = _FIRST
        is_nan = np.isnan(first[..., 0])
        far = spread * (2.6 + 0.5 * self._random.random(rows.shape[1:]))
        rows["low"] = np.where(is_nan, np.nan, np.minimum(first.min(axis=-1), -far))
        rows["high"] = np.where(is_nan, np.nan, np.maximum(first.max(axis=-1), far))
        rows["mean"] = np.where(is_nan, np.nan, first.mean(axis=-1) / 12)
        rows["nans"] = np.where(is_nan, rows["looked_at"], 0)

    def _counts(self, calls: Rows, steps_before: int) -> Rows:
        """Return the values of the cell's all_reduce: numbers of correct and of all answers, for four classes."""
        world, count = calls.shape
        asked = self._random.integers(200, 300, (world, count, 1, 4))
        steps = calls["step"].astype(np.int64) + steps_before  # steps of the whole training run
        known = 1 - 0.9 * np.exp(-steps / self._shape.course)[..., None, None]
        right = np.minimum(asked, np.round(asked * known * self._random.uniform(0.95, 1.0, asked.shape)))
        table = np.concatenate([right, asked], axis=2).reshape(world, count, 8).astype(np.float32)
        rows = self._make.rows("value", count * 2, dtype="float32").reshape(world, count, 2)
        rows["call"], rows["side"], rows["numel"], rows["looked_at"] = calls["call"][..., None], [0, 1], 8, 8
        for side, first in enumerate((table, np.broadcast_to(table.sum(axis=0), table.shape))):
            _small(rows[..., side], first)
        return rows.reshape(world, -1)

    def _passed(self, calls: Rows) -> Rows:
        """Return the values that each rank sends to the next one, and receives from the previous one."""
        world, count, _ = calls.shape
        sent = self._random.standard_normal((world, count, _FIRST), np.float32)
        rows = self._make.rows("value", count * 2, dtype="float32").reshape(world, count, 2)
        rows["call"], rows["side"] = calls["call"], [0, 1]
        rows["numel"] = rows["looked_at"] = 1024
        for at, first in enumerate((sent, np.roll(sent, 1, axis=0))):
            self._look(rows[..., at], first, np.ones((1,)))
        return rows.reshape(world, -1)


def _small(rows: Rows, table: npt.NDArray[np.float32]) -> None:
    """Set the values of tensors that are shown completely."""
    padded = np.zeros((*table.shape[:-1], _FIRST), np.float32)
    padded[..., : table.shape[-1]] = table
    rows["first"] = padded.view(f"V{FIRST_BYTES}")[..., 0]
    rows["first_count"] = table.shape[-1]
    rows["low"], rows["high"], rows["mean"] = table.min(axis=-1), table.max(axis=-1), table.mean(axis=-1)
