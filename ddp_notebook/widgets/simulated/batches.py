"""Data-parallel training that never ran, as the batches that its ranks would have sent.

Each step of a rank is input, forward, backward and optimizer, with some jitter. The backward has its gradients ready
bucket by bucket; a bucket's all-reduce begins when every rank has issued it and the one before it is through, so that
waiting, hidden and exposed communication come out as on a wire:

    rank 0   |in|forward    |backward  .b0  .b1  .b2|~~waits~~|=exposed=|opt|
    rank 2   |in|forward, slower         |backward  .b0  .b1  .b2|=exposed=|opt|

Training goes on in a second cell, in which one rank is slow in its forward.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ddp_notebook.records.codec import Batch
from ddp_notebook.records.schema import (
    FIRST_BYTES,
    ORIGINS,
    REDUCE_OPS,
    SAMPLE_OF_LARGE,
    SPANS,
    STATES,
    TABLES,
    TEXTS,
    Rows,
)

Times = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

BUCKETS = 6
STEP_MS = 41.0  # of a step without a slow rank, about
_INPUT_MS, _BETWEEN_MS, _FORWARD_MS, _BACKWARD_MS, _OPTIMIZER_MS = 1.2, 0.3, 10.0, 20.0, 2.5
_WIRE_MS = 21.0  # of all buckets one after the other
_LATENCY_MS = 0.06
_FIRST_STEP = 5.0  # times a usual one: the first pass makes buffers, and compiles
_SLOW = 1.8  # times the others' forward
_PAUSE_NS = 1_500_000_000  # between two cells
_FIRST = FIRST_BYTES // 4  # float32 elements of a tensor that are shown
_COUNTED_EVERY, _PASSED_ON_EVERY = 10, 25  # steps between the cell's own all_reduce, and between its messages
_WIDTH, _LAYERS, _VOCABULARY, _CONTEXT = 512, 6, 96, 256  # of a transformer of 19 M parameters
_MODEL, _LOADER, _OPTIMIZER = "DistributedDataParallel(Transformer)", "DataLoader", "AdamW"
_GPU_BYTES = 80 << 30


class Shape(NamedTuple):
    """What is simulated. See `simulate`."""

    world_size: int
    steps: int | None  # None: without end
    seed: int
    straggler: int | None
    slow_from: int  # the first step of the second cell
    scale: float  # of all durations
    nan_at: tuple[int, int] | None  # a rank, and a step
    values: bool
    course: float  # steps in which the loss falls by a factor of e


class Run:
    """The ranks of one simulated training.

    Args:
        shape: what to simulate.
        begin_ns: when the first cell begins.
    """

    def __init__(self, shape: Shape, begin_ns: int) -> None:
        self.shape = shape
        self.step = 0  # steps so far
        self.now_ns: Times = np.full(shape.world_size, begin_ns, np.int64)
        self._random = np.random.default_rng(shape.seed)
        self._texts: dict[str, int] = {"": 0}
        self._told = 0
        self._calls = self._spans = self._sums = self._messages = 0  # counts of each rank, which are the same on all
        self._cell, self._cell_step = 1, 0
        self._cell_began_ns = self.now_ns.copy()
        self._looked_ns = begin_ns - 1_000_000_000
        self._bias = self._random.normal(0, 0.02, shape.world_size)  # ranks have data of their own
        self._layout = layout()
        elements = np.array([bucket["nbytes"] // 4 for bucket in self._layout])
        self._numel = elements
        self._wire_ms = _WIRE_MS * elements / elements.sum()

    # ---- what the ranks send

    def batches(self, count: int) -> Iterator[Batch]:
        """Go on by up to so many steps: one batch of each rank, until there are no more steps."""
        tables: dict[str, list[Rows]] = {name: [] for name in TABLES}
        for _ in range(2):  # the border of the cells may lie within
            left = count if self.shape.steps is None else min(count, self.shape.steps - self.step)
            if self.step < self.shape.slow_from:
                left = min(left, self.shape.slow_from - self.step)
            if left > 0:
                count -= left
                self._go_on(left, tables)
                if self.step in (self.shape.slow_from, self.shape.steps):
                    self._end_cell(tables)
        told, self._told = self._told, len(self._texts) - 1
        texts = {number: text for text, number in self._texts.items() if number > told}
        joined = {name: np.concatenate(parts, axis=1) for name, parts in tables.items() if parts}
        for rank in range(self.shape.world_size):
            rows = {name: parts[rank] for name, parts in joined.items()}
            if rows:
                yield Batch(rank=rank, stream=rank + 1, texts=texts, tables=rows)

    @property
    def is_over(self) -> bool:
        return self.shape.steps is not None and self.step >= self.shape.steps

    def delay(self, ns: int) -> None:
        """The ranks were held up for so long."""
        self.now_ns += ns

    def _go_on(self, count: int, tables: dict[str, list[Rows]]) -> None:
        if self.step == 0:
            tables["layout"].append(self._layouts(is_rebuilt=False))
        clock = self._clock(count)
        calls, values = self._communication(clock)
        tables["call"].append(calls)
        if self.shape.values:
            tables["value"].append(values)
        tables["span"].append(self._stretches(clock))
        tables["metric"].append(self._metrics(clock))
        if (looks := self._resources(clock)) is not None:
            tables["resource"].append(looks)
        if self.step == 0:
            tables["layout"].append(self._layouts(is_rebuilt=True))
        self.step += count
        self._cell_step += count

    def _end_cell(self, tables: dict[str, list[Rows]]) -> None:
        self._spans += 1
        rows = self._rows("span", 1, span=self._spans, kind=SPANS.index("cell"), cell=self._cell, samples=-1)
        rows["start_ns"], rows["end_ns"] = self._cell_began_ns[:, None], self.now_ns[:, None]
        tables["span"].append(rows)
        self._cell, self._cell_step = self._cell + 1, 0
        self.now_ns = np.full(self.shape.world_size, int(self.now_ns.max()) + _PAUSE_NS)
        self._cell_began_ns = self.now_ns.copy()

    # ---- times

    def _clock(self, count: int) -> _Clock:
        """When everything happens in the next steps."""
        world, random, ms = self.shape.world_size, self._random, self.shape.scale * 1e6
        numbers = self.step + np.arange(count)
        took = np.empty((count, 5, world))  # input, between, forward, backward, optimizer; a rank's own time
        took[:] = np.array([_INPUT_MS, _BETWEEN_MS, _FORWARD_MS, _BACKWARD_MS, _OPTIMIZER_MS])[:, None]
        took *= np.exp(random.normal(0, 0.02, took.shape))
        # Now and then something else gets the core.
        took += random.exponential(2.5, took.shape) * (random.random(took.shape) < 0.002)
        if self.shape.straggler is not None:
            took[numbers >= self.shape.slow_from, 2, self.shape.straggler] *= _SLOW
        took[numbers == 0] *= _FIRST_STEP
        input_ns, between_ns, forward_ns, backward_ns, optimizer_ns = (took * ms).astype(np.int64).swapaxes(0, 1)
        wire_ns = (self._wire_ms * np.exp(random.normal(0, 0.05, (count, BUCKETS))) * ms).astype(np.int64)
        parts = np.cumsum(random.dirichlet(np.full(BUCKETS, 200.0), (count, world)), axis=2)  # of the backward
        latency_ns = int(_LATENCY_MS * ms)

        start, forward, backward = (np.empty((count, world), np.int64) for _ in range(3))
        issued, through = np.empty((count, world, BUCKETS), np.int64), np.empty((count, BUCKETS), np.int64)
        optimizer, end, summed, passed = (np.empty((count, world), np.int64) for _ in range(4))
        now = self.now_ns
        for at, number in enumerate(numbers.tolist()):
            start[at] = now
            forward[at] = now + input_ns[at] + between_ns[at]
            backward[at] = forward[at] + forward_ns[at]
            issued[at] = backward[at][:, None] + (parts[at] * backward_ns[at][:, None]).astype(np.int64)
            before = 0
            for bucket, arrived in enumerate(issued[at].max(axis=0).tolist()):
                before = through[at, bucket] = max(arrived, before) + int(wire_ns[at, bucket]) * (world > 1)
            optimizer[at] = np.maximum(before, issued[at, :, -1]) + latency_ns
            end[at] = now = optimizer[at] + optimizer_ns[at]
            if _is_counted(number):
                summed[at] = now = np.full(world, int(now.max()) + latency_ns)
            if _is_passed_on(number) and world > 1:
                passed[at] = now = np.maximum(now, np.roll(now, 1)) + 2 * latency_ns  # what the rank before sends
        self.now_ns = now
        ends = (optimizer, end, summed, passed)
        return _Clock(numbers, start, start + input_ns, forward, backward, issued, through, *ends)

    # ---- rows of all ranks: (world_size, n)

    def _rows(self, table: str, count: int, **columns: Any) -> Rows:
        rows = np.zeros((self.shape.world_size, count), TABLES[table])
        rows["rank"] = np.arange(self.shape.world_size)[:, None]
        for name, value in columns.items():
            rows[name] = self._text(value) if name in TEXTS[table] else value
        return rows

    def _text(self, text: str) -> int:
        return self._texts.setdefault(text, len(self._texts))

    def _layouts(self, *, is_rebuilt: bool) -> Rows:
        words = json.dumps(self._layout)
        rows = self._rows("layout", 1, model=_MODEL, buckets=words, is_rebuilt=is_rebuilt)
        rows["time_ns"] = self.now_ns[:, None]
        return rows

    def _stretches(self, clock: _Clock) -> Rows:
        count = len(clock.numbers)
        rows = self._rows("span", 4 * count, cell=self._cell, samples=-1)
        of_step = rows.reshape(-1, count, 4)
        of_step["step"] = (self._cell_step + np.arange(count))[:, None]
        of_step["span"] = self._spans + 1 + np.arange(4 * count).reshape(count, 4)
        stretches = (
            ("input", _LOADER, clock.start, clock.input_end),
            ("forward", _MODEL, clock.forward, clock.backward),
            ("backward", "", clock.backward, clock.optimizer),
            ("optimizer", _OPTIMIZER, clock.optimizer, clock.end),
        )
        for at, (kind, name, begin, end) in enumerate(stretches):
            one = of_step[:, :, at]
            one["kind"], one["name"] = SPANS.index(kind), self._text(name)
            one["start_ns"], one["end_ns"] = begin.T, end.T
            if kind in ("input", "forward"):
                one["samples"] = 32
        self._spans += 4 * count
        return rows

    def _communication(self, clock: _Clock) -> tuple[Rows, Rows]:
        """Calls in the order of their issue, and the values of them."""
        count, world = len(clock.numbers), self.shape.world_size
        counted = np.flatnonzero([_is_counted(number) for number in clock.numbers])
        passed = np.flatnonzero([_is_passed_on(number) and world > 1 for number in clock.numbers])
        sums = np.full(count, BUCKETS)
        sums[counted] += 1
        own = sums.copy()
        own[passed] += 2
        first = self._calls + 1 + np.cumsum(own) - own  # the first call of each step
        numbers = self._sums + 1 + np.cumsum(sums) - sums  # the first collective, which are counted on their own

        step = self._cell_step + np.arange(count)
        group = json.dumps({"name": "0", "title": "default", "ranks": list(range(world))})
        common: dict[str, Any] = {
            "group": group,
            "dtype": "float32",
            "cell": self._cell,
            "bucket": -1,
            "peer": -1,
            "start_ns": -1,
            "state": STATES.index("done"),
        }
        reduce_op = REDUCE_OPS.index("SUM")

        ddp = self._rows("call", count * BUCKETS, op="all_reduce", api="backward", module=_MODEL, **common)
        of_step = ddp.reshape(world, count, BUCKETS)
        ddp["reduce_op"], ddp["origin"], ddp["is_async"] = reduce_op, ORIGINS.index("ddp"), True
        of_step["bucket"] = np.arange(BUCKETS)
        of_step["shapes"] = [self._text(json.dumps([[int(numel)]])) for numel in self._numel]
        of_step["nbytes_in"] = of_step["nbytes_out"] = 4 * self._numel
        of_step["call"] = first[:, None] + np.arange(BUCKETS)
        of_step["number"] = numbers[:, None] + np.arange(BUCKETS)
        of_step["step"] = step[:, None]
        of_step["backward"] = (self._spans + 3 + 4 * np.arange(count))[:, None]
        of_step["issue_ns"] = clock.issued.swapaxes(0, 1)
        of_step["end_ns"] = np.maximum(clock.through, of_step["issue_ns"])

        line = {"op": "all_reduce", "api": "all_reduce", "site": "cell line 12", "shapes": "[[2, 4]]"}
        mine = self._rows("call", len(counted), **line, **common)
        mine["reduce_op"] = reduce_op
        mine["nbytes_in"] = mine["nbytes_out"] = 32
        mine["call"], mine["number"] = (first + BUCKETS)[counted], (numbers + BUCKETS)[counted]
        mine["step"] = step[counted] + 1
        mine["issue_ns"], mine["end_ns"] = clock.end[counted].T, clock.summed[counted].T
        mine["blocked_ns"] = mine["end_ns"] - mine["issue_ns"]

        line = {"api": "batch_isend_irecv", "site": "cell line 15", "shapes": "[[16, 64]]"}
        messages = self._rows("call", 2 * len(passed), **line, **common)
        pairs = messages.reshape(world, len(passed), 2)
        pairs["op"] = [self._text("send"), self._text("recv")]
        pairs["peer"] = np.stack([np.roll(np.arange(world), -1), np.roll(np.arange(world), 1)], axis=1)[:, None]
        pairs["nbytes_in"], pairs["nbytes_out"], pairs["is_async"] = [4096, 0], [0, 4096], True
        pairs["call"] = (first + own - 2)[passed][:, None] + np.arange(2)
        pairs["number"] = (self._messages + 1 + np.arange(len(passed)))[:, None]
        pairs["step"] = step[passed][:, None] + 1
        begin = np.where(np.isin(passed, counted)[:, None], clock.summed[passed], clock.end[passed])
        pairs["issue_ns"] = begin.T[:, :, None] + np.array([0, 20_000])
        pairs["end_ns"] = np.maximum(clock.passed[passed].T[:, :, None], pairs["issue_ns"])
        pairs["blocked_ns"] = pairs["end_ns"] - pairs["issue_ns"]

        values = [self._gradients(clock, of_step)] if self.shape.values else []
        if self.shape.values:
            values += [self._counts(mine), self._passed(pairs)]
        self._calls += int(own.sum())
        self._sums += int(sums.sum())
        self._messages += len(passed)
        calls = np.concatenate([ddp, mine, messages], axis=1)
        calls = calls[:, np.argsort(calls["call"][0], kind="stable")]
        return calls, np.concatenate(values, axis=1) if values else self._rows("value", 0)

    def _gradients(self, clock: _Clock, calls: Rows) -> Rows:
        """Of each bucket: every rank's share of the mean (DDP divides before it adds up), and the sum of them."""
        world, count = self.shape.world_size, len(clock.numbers)
        size = (0.02 * np.exp(-clock.numbers / self.shape.course) + 0.002) / world  # (count,)
        shares = self._random.standard_normal((world, count, BUCKETS, _FIRST), np.float32)
        shares *= size.astype("f4")[:, None, None]
        sums = shares.sum(axis=0, dtype=np.float32)
        bad = np.zeros((world, count), bool)
        if self.shape.nan_at is not None:
            rank, step = self.shape.nan_at
            bad[rank, clock.numbers == step] = True
            bad[:, clock.numbers > step] = True
        shares[bad] = np.nan
        sums[bad.any(axis=0)] = np.nan
        rows = self._rows("value", count * BUCKETS * 2, dtype="float32").reshape(world, count, BUCKETS, 2)
        rows["call"], rows["side"] = calls["call"][..., None], [0, 1]
        rows["numel"], rows["looked_at"] = self._numel[:, None], SAMPLE_OF_LARGE
        spread = np.stack([size, size * math.sqrt(world)], axis=1)[:, None]  # (count, 1, 2)
        for side, first in enumerate((shares, np.broadcast_to(sums, shares.shape))):
            part = rows[..., side]
            self._look(part, first, spread[..., side])
        return rows.reshape(world, -1)

    def _look(self, rows: Rows, first: npt.NDArray[np.float32], spread: Floats) -> None:
        """The range of a tensor of which these are the first elements, and the others as large as `spread`."""
        rows["first"] = np.ascontiguousarray(first).view(f"V{FIRST_BYTES}")[..., 0]
        rows["first_count"] = _FIRST
        is_nan = np.isnan(first[..., 0])
        far = spread * (2.6 + 0.5 * self._random.random(rows.shape[1:]))
        rows["low"] = np.where(is_nan, np.nan, np.minimum(first.min(axis=-1), -far))
        rows["high"] = np.where(is_nan, np.nan, np.maximum(first.max(axis=-1), far))
        rows["mean"] = np.where(is_nan, np.nan, first.mean(axis=-1) / 12)
        rows["nans"] = np.where(is_nan, rows["looked_at"], 0)

    def _counts(self, calls: Rows) -> Rows:
        """What the cell's own all_reduce adds up: right answers and answers of four classes."""
        world, count = calls.shape
        asked = self._random.integers(200, 300, (world, count, 1, 4))
        steps = calls["step"].astype(np.int64) + self.step - self._cell_step  # of the whole training
        known = 1 - 0.9 * np.exp(-steps / self.shape.course)[..., None, None]
        right = np.minimum(asked, np.round(asked * known * self._random.uniform(0.95, 1.0, asked.shape)))
        table = np.concatenate([right, asked], axis=2).reshape(world, count, 8).astype(np.float32)
        rows = self._rows("value", count * 2, dtype="float32").reshape(world, count, 2)
        rows["call"], rows["side"], rows["numel"], rows["looked_at"] = calls["call"][..., None], [0, 1], 8, 8
        for side, first in enumerate((table, np.broadcast_to(table.sum(axis=0), table.shape))):
            _small(rows[..., side], first)
        return rows.reshape(world, -1)

    def _passed(self, calls: Rows) -> Rows:
        """What each rank sends to the next one, and gets from the one before."""
        world, count, _ = calls.shape
        sent = self._random.standard_normal((world, count, _FIRST), np.float32)
        rows = self._rows("value", count * 2, dtype="float32").reshape(world, count, 2)
        rows["call"], rows["side"] = calls["call"], [0, 1]
        rows["numel"] = rows["looked_at"] = 1024
        for at, first in enumerate((sent, np.roll(sent, 1, axis=0))):
            self._look(rows[..., at], first, np.ones((1,)))
        return rows.reshape(world, -1)

    def _metrics(self, clock: _Clock) -> Rows:
        count, world = len(clock.numbers), self.shape.world_size
        falls = np.exp(-clock.numbers / self.shape.course)
        noise = np.exp(self._random.normal(0, 0.03, (world, count)) + self._bias[:, None])
        loss = (0.1 + 2.2 * falls) * noise
        accuracy = np.clip(1 - 0.9 * falls - 0.05 * loss, 0, 1)
        if self.shape.nan_at is not None:  # one step later all ranks have it in their parameters
            loss[:, clock.numbers > self.shape.nan_at[1]] = np.nan
        rows = self._rows("metric", 2 * count, cell=self._cell).reshape(world, count, 2)
        rows["name"] = [self._text("loss"), self._text("accuracy")]
        rows["step"], rows["time_ns"] = clock.numbers[:, None], clock.end.T[..., None]
        rows["value"] = np.stack([loss, accuracy], axis=2)
        return rows.reshape(world, -1)

    def _resources(self, clock: _Clock) -> Rows | None:
        """A look at memory and load each second."""
        seconds = np.arange(self._looked_ns + 1_000_000_000, int(clock.end.max()) + 1, 1_000_000_000)
        if not len(seconds):
            return None
        self._looked_ns = int(seconds[-1])
        world, random = self.shape.world_size, self._random
        waited = clock.issued[:, :, -1].max(axis=1, keepdims=True) - clock.issued[:, :, -1]
        busy = 100 * (1 - (waited / (clock.end - clock.start)).mean(axis=0))  # (world,)
        rows = self._rows("resource", len(seconds))
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


class _Clock(NamedTuple):
    """When everything happens, in nanoseconds: (steps, world_size) where nothing else is said."""

    numbers: npt.NDArray[np.int64]  # (steps,)
    start: Times
    input_end: Times
    forward: Times
    backward: Times
    issued: Times  # (steps, world_size, BUCKETS)
    through: Times  # (steps, BUCKETS)
    optimizer: Times
    end: Times
    summed: Times  # the end of the cell's own all_reduce, in steps that have one
    passed: Times  # the end of its messages


def _is_counted(step: int) -> bool:
    return step % _COUNTED_EVERY == _COUNTED_EVERY - 1


def _is_passed_on(step: int) -> bool:
    return step % _PASSED_ON_EVERY == _PASSED_ON_EVERY - 1


def _small(rows: Rows, table: npt.NDArray[np.float32]) -> None:
    """The values of tensors that are shown whole."""
    padded = np.zeros((*table.shape[:-1], _FIRST), np.float32)
    padded[..., : table.shape[-1]] = table
    rows["first"] = padded.view(f"V{FIRST_BYTES}")[..., 0]
    rows["first_count"] = table.shape[-1]
    rows["low"], rows["high"], rows["mean"] = table.min(axis=-1), table.max(axis=-1), table.mean(axis=-1)


def layout() -> list[dict[str, Any]]:
    """The parameters of a transformer in buckets, the last layer first, as DDP has them."""
    sizes = {"token.weight": _VOCABULARY * _WIDTH, "position.weight": _CONTEXT * _WIDTH}
    for block in range(_LAYERS):
        for name, numel in (
            ("norm1.weight", _WIDTH),
            ("attention.qkv.weight", 3 * _WIDTH**2),
            ("attention.out.weight", _WIDTH**2),
            ("norm2.weight", _WIDTH),
            ("mlp.up.weight", 4 * _WIDTH**2),
            ("mlp.down.weight", 4 * _WIDTH**2),
        ):
            sizes[f"blocks.{block}.{name}"] = numel
    sizes |= {"norm.weight": _WIDTH, "head.weight": _VOCABULARY * _WIDTH}
    buckets: list[dict[str, Any]] = [{"nbytes": 0, "parameters": []}]
    most = 4 * sum(sizes.values()) / BUCKETS
    for name, numel in reversed(sizes.items()):
        if buckets[-1]["nbytes"] + 2 * numel > most and len(buckets) < BUCKETS:
            buckets.append({"nbytes": 0, "parameters": []})
        buckets[-1]["nbytes"] += 4 * numel
        buckets[-1]["parameters"].append(name)
    return buckets
