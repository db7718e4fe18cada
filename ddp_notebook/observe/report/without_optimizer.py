"""Cells without an optimizer step: pipelines, remote calls and inference, and what such a cell did in numbers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ddp_notebook.observe.report.bubbles import bubbles
from ddp_notebook.observe.tables.matching import RowSource, label_of
from ddp_notebook.observe.tables.parts import CellPart
from ddp_notebook.observe.tables.ring_buffer import select
from ddp_notebook.records.names import readable
from ddp_notebook.records.schema import RPC_KINDS, SPANS, Rows
from ddp_notebook.records.units import ms
from ddp_notebook.records.words import list_ranks

_BACKWARD, _OPTIMIZER, _PIPELINE = map(SPANS.index, ("backward", "optimizer", "pipeline"))
_PASSES = [SPANS.index(kind) for kind in ("forward", "evaluation")]
_FEWEST_PASSES = 3  # a cell with fewer forward passes of a rank may only look at a result
_MOST_MODELS = 4
_OF_USER = [RPC_KINDS.index(kind) for kind in ("rpc_sync", "rpc_async", "remote")]


def last_without_optimizer(recording: RowSource, since: int) -> int | None:
    """Return the last cell after `since` that ran a pipeline, remote calls or inference, and no optimizer step.

    Args:
        since: number of a cell; -1: all cells.

    Example:
        >>> from tests.observe.synthetic import simulate
        >>> last_without_optimizer(simulate(), since=-1) is None
        True
    """
    spans, calls = recording.rows("span"), recording.rows("rpc")
    spans = select(spans, (spans["cell"] > since) & (spans["end_ns"] >= 0))
    pipelined = spans["cell"][spans["kind"] == _PIPELINE]
    remote = calls["cell"][(calls["cell"] > since) & np.isin(calls["kind"], _OF_USER)]
    passes = spans[np.isin(spans["kind"], _PASSES)]
    cells, counts = np.unique(passes["cell"].astype(np.int64) << 32 | passes["rank"], return_counts=True)
    inferring = cells[counts >= _FEWEST_PASSES] >> 32
    learning = spans["cell"][spans["kind"] == _BACKWARD]
    inferring = inferring[~np.isin(inferring, learning)]
    found = np.concatenate([pipelined, remote, inferring]).astype(np.int64)
    found = found[~np.isin(found, spans["cell"][spans["kind"] == _OPTIMIZER])]
    return int(found.max()) if len(found) else None


def did(recording: RowSource, cell: int) -> tuple[str, ...]:
    """Return sentences about the forward passes and pipeline steps of a cell; () if it had none.

    Args:
        recording: the recorded tables.
        cell: number of the cell.
    """
    own = CellPart(recording, cell)  # type: ignore[arg-type]  # only its rows are read
    spans = own.rows("span")
    spans = select(spans, spans["end_ns"] >= 0)
    return (*_pipelines(own, spans), *_inference(own, spans))


def _pipelines(own: RowSource, spans: Rows) -> Iterator[str]:
    steps = select(spans, spans["kind"] == _PIPELINE)
    if len(steps) and not bubbles(own, None):
        count = int(np.unique(steps["rank"], return_counts=True)[1].max())
        yield f"Pipeline: {count:,} step{'s' * (count != 1)} on {list_ranks(np.unique(steps['rank']).tolist())}"


def _inference(own: RowSource, spans: Rows) -> Iterator[str]:
    passes = select(spans, np.isin(spans["kind"], _PASSES))
    if (spans["kind"] == _BACKWARD).any() or not len(passes):
        return
    for name in np.unique(passes["name"]).tolist()[:_MOST_MODELS]:
        rows = select(passes, passes["name"] == name)
        ranks, counts = np.unique(rows["rank"], return_counts=True)
        took = rows["end_ns"] - rows["start_ns"]
        each = f"{counts.min():,}" if counts.min() == counts.max() else f"{counts.min():,} to {counts.max():,}"
        plural = "es" * int(counts.max() != 1)
        text = (
            f"Inference: {each} forward pass{plural} of {readable(own.text(name))} on {list_ranks(ranks.tolist())}, "
            f"median {ms(float(np.median(took)))}"
        )
        if (rows["samples"] > 0).all():
            lasted = rows["end_ns"].max() - rows["start_ns"].min()
            text += f", {int(rows['samples'].sum()) / max(1, lasted) * 1e9:,.0f} samples/s of all ranks"
        yield text


def instead_of(recording: RowSource, cell: int, older: int | None) -> str:
    """Return the first sentence of the report on a cell without an optimizer step.

    Args:
        older: the last cell with optimizer steps; None: there is none.
    """
    label = label_of(recording, cell)
    if older is None:
        return f"{label} ran no optimizer step"
    return (
        f"{label} ran no optimizer step. The last cell with steps is {label_of(recording, older)}, and "
        f"session.report({older}) shows its report"
    )
