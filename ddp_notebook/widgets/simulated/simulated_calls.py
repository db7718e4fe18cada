"""Calls of simulated ranks: gradient buckets, an all_reduce in the code of the cell, messages to the next rank."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import numpy as np

from ddp_notebook.records.schema import ORIGINS, REDUCE_OPS, STATES, Rows
from ddp_notebook.widgets.simulated.rows import RowMaker
from ddp_notebook.widgets.simulated.schedule import StepTimes, Times
from ddp_notebook.widgets.simulated.shape import BUCKETS, MODEL, Shape, has_messages, has_sum


class SimulatedCalls(NamedTuple):
    """Rows of `records.CALL` by purpose."""

    ddp: Rows  # (world_size, steps, BUCKETS)
    sums: Rows  # (world_size, n)
    messages: Rows  # (world_size, n, 2): a send and a receive

    def in_order(self) -> Rows:
        """Return (world_size, n) all calls, in the order of their issue."""
        world = len(self.ddp)
        calls = np.concatenate([self.ddp.reshape(world, -1), self.sums, self.messages.reshape(world, -1)], axis=1)
        return calls[:, np.argsort(calls["call"][0], kind="stable")]


class CallMaker:
    """Creates and numbers the calls of one training run.

    Args:
        shape: Parameters of the simulation.
        make: Creates rows.
        elements: (BUCKETS,) Elements of each bucket.
    """

    def __init__(self, shape: Shape, make: RowMaker, elements: Times) -> None:
        self._shape = shape
        self._make = make
        self._elements = elements
        self._calls = self._sums = self._messages = 0  # counts per rank, equal on all ranks

    def calls(self, times: StepTimes, cell: int, cell_step: int, spans: int) -> SimulatedCalls:
        """Return the calls of the next steps.

        Args:
            times: Times of these steps.
            cell: Number of their cell.
            cell_step: Number of earlier steps in the cell.
            spans: Number of earlier spans of each rank.
        """
        count, world = len(times.numbers), self._shape.world_size
        counted = np.flatnonzero([has_sum(number) for number in times.numbers.tolist()])
        passed = np.flatnonzero([has_messages(number, world) for number in times.numbers.tolist()])
        sums = np.full(count, BUCKETS)
        sums[counted] += 1
        own = sums.copy()
        own[passed] += 2
        first = self._calls + 1 + np.cumsum(own) - own  # the first call of each step
        # first collective of each step; collectives have separate numbers
        numbers = self._sums + 1 + np.cumsum(sums) - sums

        step = cell_step + np.arange(count)
        group = json.dumps({"name": "0", "title": "default", "ranks": list(range(world))})
        common: dict[str, Any] = {
            "group": group,
            "dtype": "float32",
            "cell": cell,
            "bucket": -1,
            "peer": -1,
            "start_ns": -1,
            "state": STATES.index("done"),
        }
        reduce_op = REDUCE_OPS.index("SUM")

        ddp = self._make.rows("call", count * BUCKETS, op="all_reduce", api="backward", module=MODEL, **common)
        of_step = ddp.reshape(world, count, BUCKETS)
        ddp["reduce_op"], ddp["origin"], ddp["is_async"] = reduce_op, ORIGINS.index("ddp"), True
        of_step["bucket"] = np.arange(BUCKETS)
        of_step["shapes"] = [self._make.text(json.dumps([[int(numel)]])) for numel in self._elements]
        of_step["nbytes_in"] = of_step["nbytes_out"] = 4 * self._elements
        of_step["call"] = first[:, None] + np.arange(BUCKETS)
        of_step["number"] = numbers[:, None] + np.arange(BUCKETS)
        of_step["step"] = step[:, None]
        of_step["backward"] = (spans + 3 + 4 * np.arange(count))[:, None]
        of_step["issue_ns"] = times.issued.swapaxes(0, 1)
        of_step["end_ns"] = np.maximum(times.through, of_step["issue_ns"])

        line = {"op": "all_reduce", "api": "all_reduce", "site": "cell line 12", "shapes": "[[2, 4]]"}
        mine = self._make.rows("call", len(counted), **line, **common)
        mine["reduce_op"] = reduce_op
        mine["nbytes_in"] = mine["nbytes_out"] = 32
        mine["call"], mine["number"] = (first + BUCKETS)[counted], (numbers + BUCKETS)[counted]
        mine["step"] = step[counted] + 1
        mine["issue_ns"], mine["end_ns"] = times.end[counted].T, times.summed[counted].T
        mine["blocked_ns"] = mine["end_ns"] - mine["issue_ns"]

        line = {"api": "batch_isend_irecv", "site": "cell line 15", "shapes": "[[16, 64]]"}
        messages = self._make.rows("call", 2 * len(passed), **line, **common)
        pairs = messages.reshape(world, len(passed), 2)
        pairs["op"] = [self._make.text("send"), self._make.text("recv")]
        pairs["peer"] = np.stack([np.roll(np.arange(world), -1), np.roll(np.arange(world), 1)], axis=1)[:, None]
        pairs["nbytes_in"], pairs["nbytes_out"], pairs["is_async"] = [4096, 0], [0, 4096], True
        pairs["call"] = (first + own - 2)[passed][:, None] + np.arange(2)
        pairs["number"] = (self._messages + 1 + np.arange(len(passed)))[:, None]
        pairs["step"] = step[passed][:, None] + 1
        begin = np.where(np.isin(passed, counted)[:, None], times.summed[passed], times.end[passed])
        pairs["issue_ns"] = begin.T[:, :, None] + np.array([0, 20_000])
        pairs["end_ns"] = np.maximum(times.passed[passed].T[:, :, None], pairs["issue_ns"])
        pairs["blocked_ns"] = pairs["end_ns"] - pairs["issue_ns"]

        self._calls += int(own.sum())
        self._sums += int(sums.sum())
        self._messages += len(passed)
        return SimulatedCalls(ddp=of_step, sums=mine, messages=pairs)
