"""Simulated data-parallel training, as the batches that its ranks would have sent.

Each step of a rank consists of input, forward, backward and optimizer, with some jitter. Training continues in a second
cell, where one rank has a slow forward.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np

from ddp_notebook.records.codec import Batch
from ddp_notebook.records.schema import SPANS, TABLES, Rows
from ddp_notebook.widgets.simulated.rows import RowMaker
from ddp_notebook.widgets.simulated.schedule import StepTimes, Times, times_of
from ddp_notebook.widgets.simulated.shape import LOADER, MODEL, OPTIMIZER, Shape, layout
from ddp_notebook.widgets.simulated.simulated_calls import CallMaker
from ddp_notebook.widgets.simulated.simulated_values import ValueMaker

_PAUSE_NS = 1_500_000_000  # between two cells
_GPU_BYTES = 80 << 30


class SimulatedRanks:
    """The ranks of one simulated training run.

    Args:
        shape: Parameters of the simulation.
        begin_ns: Start of the first cell.
    """

    def __init__(self, shape: Shape, begin_ns: int) -> None:
        self.shape = shape
        self.step = 0  # steps so far
        self.now_ns: Times = np.full(shape.world_size, begin_ns, np.int64)
        self._random = np.random.default_rng(shape.seed)
        self._spans = 0  # spans of each rank so far
        self._cell, self._cell_step = 1, 0
        self._cell_began_ns = self.now_ns.copy()
        self._looked_ns = begin_ns - 1_000_000_000
        self._bias = self._random.normal(0, 0.02, shape.world_size)  # each rank has different data
        self._layout = layout()
        self._elements = np.array([bucket["nbytes"] // 4 for bucket in self._layout])
        self._make = RowMaker(shape.world_size)
        self._calls = CallMaker(shape, self._make, self._elements)
        self._values = ValueMaker(shape, self._make, self._elements, self._random)

    # ---- what the ranks send

    def batches(self, count: int) -> Iterator[Batch]:
        """Simulate up to `count` steps. Yield one batch of each rank, or nothing after the last step."""
        tables: dict[str, list[Rows]] = {name: [] for name in TABLES}
        for _ in range(2):  # the steps may belong to two cells
            left = count if self.shape.steps is None else min(count, self.shape.steps - self.step)
            if self.step < self.shape.slow_from:
                left = min(left, self.shape.slow_from - self.step)
            if left > 0:
                count -= left
                self._go_on(left, tables)
                if self.step in (self.shape.slow_from, self.shape.steps):
                    self._end_cell(tables)
        texts = self._make.new_texts()
        joined = {name: np.concatenate(parts, axis=1) for name, parts in tables.items() if parts}
        for rank in range(self.shape.world_size):
            rows = {name: parts[rank] for name, parts in joined.items()}
            if rows:
                yield Batch(rank=rank, stream=rank + 1, texts=texts, tables=rows)

    @property
    def is_over(self) -> bool:
        return self.shape.steps is not None and self.step >= self.shape.steps

    def delay(self, ns: int) -> None:
        """Delay all ranks."""
        self.now_ns += ns

    def _go_on(self, count: int, tables: dict[str, list[Rows]]) -> None:
        if self.step == 0:
            tables["layout"].append(self._layouts(is_rebuilt=False))
        numbers = self.step + np.arange(count)
        times, self.now_ns = times_of(self.shape, numbers, self.now_ns, self._elements, self._random)
        calls = self._calls.calls(times, self._cell, self._cell_step, self._spans)
        tables["call"].append(calls.in_order())
        if self.shape.values:
            tables["value"].append(self._values.values(times, calls, self.step - self._cell_step))
        tables["span"].append(self._stretches(times))
        tables["metric"].append(self._metrics(times))
        if (looks := self._resources(times)) is not None:
            tables["resource"].append(looks)
        if self.step == 0:
            tables["layout"].append(self._layouts(is_rebuilt=True))
        self.step += count
        self._cell_step += count

    def _end_cell(self, tables: dict[str, list[Rows]]) -> None:
        self._spans += 1
        rows = self._make.rows("span", 1, span=self._spans, kind=SPANS.index("cell"), cell=self._cell, samples=-1)
        rows["start_ns"], rows["end_ns"] = self._cell_began_ns[:, None], self.now_ns[:, None]
        tables["span"].append(rows)
        self._cell, self._cell_step = self._cell + 1, 0
        self.now_ns = np.full(self.shape.world_size, int(self.now_ns.max()) + _PAUSE_NS)
        self._cell_began_ns = self.now_ns.copy()

    # ---- rows of all ranks: (world_size, n)

    def _layouts(self, *, is_rebuilt: bool) -> Rows:
        words = json.dumps(self._layout)
        rows = self._make.rows("layout", 1, model=MODEL, buckets=words, is_rebuilt=is_rebuilt)
        rows["time_ns"] = self.now_ns[:, None]
        return rows

    def _stretches(self, times: StepTimes) -> Rows:
        count = len(times.numbers)
        rows = self._make.rows("span", 4 * count, cell=self._cell, samples=-1)
        of_step = rows.reshape(-1, count, 4)
        of_step["step"] = (self._cell_step + np.arange(count))[:, None]
        of_step["span"] = self._spans + 1 + np.arange(4 * count).reshape(count, 4)
        stretches = (
            ("input", LOADER, times.start, times.input_end),
            ("forward", MODEL, times.forward, times.backward),
            ("backward", "", times.backward, times.optimizer),
            ("optimizer", OPTIMIZER, times.optimizer, times.end),
        )
        for at, (kind, name, begin, end) in enumerate(stretches):
            one = of_step[:, :, at]
            one["kind"], one["name"] = SPANS.index(kind), self._make.text(name)
            one["start_ns"], one["end_ns"] = begin.T, end.T
            if kind in ("input", "forward"):
                one["samples"] = 32
        self._spans += 4 * count
        return rows

    def _metrics(self, times: StepTimes) -> Rows:
        count, world = len(times.numbers), self.shape.world_size
        falls = np.exp(-times.numbers / self.shape.course)
        noise = np.exp(self._random.normal(0, 0.03, (world, count)) + self._bias[:, None])
        loss = (0.1 + 2.2 * falls) * noise
        accuracy = np.clip(1 - 0.9 * falls - 0.05 * loss, 0, 1)
        if self.shape.nan_at is not None:  # one step later, the parameters of all ranks are NaN
            loss[:, times.numbers > self.shape.nan_at[1]] = np.nan
        rows = self._make.rows("metric", 2 * count, cell=self._cell).reshape(world, count, 2)
        rows["name"] = [self._make.text("loss"), self._make.text("accuracy")]
        rows["step"], rows["time_ns"] = times.numbers[:, None], times.end.T[..., None]
        rows["is_given"] = True  # the step numbers continue in the second cell
        rows["value"] = np.stack([loss, accuracy], axis=2)
        return rows.reshape(world, -1)

    def _resources(self, times: StepTimes) -> Rows | None:
        """Sample memory and load once per second."""
        seconds = np.arange(self._looked_ns + 1_000_000_000, int(times.end.max()) + 1, 1_000_000_000)
        if not len(seconds):
            return None
        self._looked_ns = int(seconds[-1])
        world, random = self.shape.world_size, self._random
        waited = times.issued[:, :, -1].max(axis=1, keepdims=True) - times.issued[:, :, -1]
        busy = 100 * (1 - (waited / (times.end - times.start)).mean(axis=0))  # (world,)
        rows = self._make.rows("resource", len(seconds))
        shape = rows.shape
        rows["time_ns"] = seconds
        rows["rss_bytes"] = (1.9e9 + 4e6 * np.arange(world)[:, None] + random.normal(0, 5e6, shape)).astype(np.int64)
        rows["cpu_percent"] = random.normal(98, 2, shape).clip(0, 130)
        rows["host_total_bytes"] = 1 << 40
        rows["host_used_bytes"] = (1.2e11 + random.normal(0, 1e8, len(seconds))).astype(np.int64)
        rows["gpu_allocated_bytes"] = (0.31 * _GPU_BYTES + random.normal(0, 2e8, shape)).astype(np.int64)
        rows["gpu_reserved_bytes"] = round(0.4 * _GPU_BYTES)
        rows["gpu_peak_bytes"] = round(0.36 * _GPU_BYTES)
        rows["gpu_percent"] = (busy[:, None] + random.normal(-1, 1, shape)).clip(0, 100)
        return rows
