"""Recordings of training runs with gradients and losses that are not finite, made row by row."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ddp_notebook.observe.recording import Recording
from ddp_notebook.records.codec import Batch
from ddp_notebook.records.schema import ORIGINS, REDUCE_OPS, SPANS, TABLES

MODEL, PARAMETERS = "DDP(Net)", [["c.weight", "c.bias"], ["b.weight"], ["a.weight"]]
_TEXTS = ["", MODEL, "all_reduce", "loss", "SGD", "cell line 7", "best", "reduce_scatter_single", "layers.1"]
Bad = Mapping[tuple[int, int], Sequence[int]]  # buckets by (step, rank)


def recorded(
    world_size: int = 2,
    steps: int = 10,
    *,
    nan: Bad = {},  # noqa: B006 - read only
    infinite: Bad = {},  # noqa: B006
    repeated: Sequence[int] = (),
    left_out: Sequence[int] = (),
    losses: Mapping[tuple[int, int], float] | None = None,
    best: float | None = None,
    cell: int = 1,
    origin: str = "ddp",
    into: Recording | None = None,
) -> Recording:
    """Return the recording of a run with three buckets.

    Args:
        nan, infinite: buckets with such values, by step and rank.
        repeated: steps with a second, finite backward, as after a skipped step.
        left_out: steps whose values were not recorded.
        losses: losses that differ from 1, by step and rank; None: nothing was logged.
        best: a second metric, with this value on each step.
        cell: number of the cell.
        origin: "ddp", "fsdp" (without buckets) or "user".
        into: a recording of earlier cells.
    """
    recording = Recording(world_size) if into is None else into
    texts = [*_TEXTS, json.dumps([{"nbytes": 400, "parameters": names} for names in PARAMETERS])]
    number = {text: at for at, text in enumerate(texts)}
    for rank in range(world_size):
        calls, values, metrics, spans = [], [], [], []
        serial = cell * 10_000
        for step in range(steps):
            for attempt in range(1 + (step in repeated)):
                for bucket in range(3):
                    serial += 1
                    op = "reduce_scatter_single" if origin == "fsdp" else "all_reduce"
                    calls.append(
                        {
                            "call": serial, "rank": rank, "cell": cell, "step": step, "op": number[op],
                            "bucket": bucket if origin == "ddp" else -1, "origin": ORIGINS.index(origin),
                            "module": number[{"ddp": MODEL, "fsdp": "layers.1", "user": ""}[origin]],
                            "site": number["cell line 7"], "reduce_op": REDUCE_OPS.index("SUM"),
                            "left_out": step in left_out,
                        }
                    )  # fmt: skip
                    if step in left_out:
                        continue
                    is_first = not attempt
                    nans = 5 if is_first and bucket in nan.get((step, rank), ()) else 0
                    infs = 3 if is_first and bucket in infinite.get((step, rank), ()) else 0
                    values.append(
                        {"rank": rank, "call": serial, "numel": 100, "looked_at": 100, "nans": nans, "infs": infs}
                    )
            if losses is not None:
                metrics.append(_metric("loss", losses.get((step, rank), 1.0), step, rank, cell, number))
            if best is not None:
                metrics.append(_metric("best", best, step, rank, cell, number))
            spans.append({"span": serial, "rank": rank, "kind": SPANS.index("optimizer"), "cell": cell, "step": step})
        layouts = [{"rank": rank, "model": number[MODEL], "buckets": len(texts) - 1}]
        tables: dict[str, list[dict[str, Any]]] = {
            "call": calls,
            "value": values,
            "metric": metrics,
            "span": spans,
            "layout": layouts,
        }
        rows = {name: _rows(name, some) for name, some in tables.items() if some}
        recording._feed(Batch(rank=rank, stream=1, texts=dict(enumerate(texts)), tables=rows))
    return recording


def _metric(name: str, value: float, step: int, rank: int, cell: int, number: Mapping[str, int]) -> dict[str, object]:
    return {
        "name": number[name], "value": value, "step": step, "rank": rank, "cell": cell,
        "time_ns": cell * 10**9 + step * 10**6 + rank,
    }  # fmt: skip


def _rows(table: str, some: Sequence[Mapping[str, Any]]) -> np.ndarray:
    rows = np.zeros(len(some), TABLES[table])
    for name in some[0]:
        rows[name] = [one[name] for one in some]
    return rows


def from_on(step: int, ranks: int, steps: int = 10) -> dict[tuple[int, int], list[int]]:
    """Return all buckets of all ranks from a step on."""
    return {(one, rank): [0, 1, 2] for one in range(step, steps) for rank in range(ranks)}
