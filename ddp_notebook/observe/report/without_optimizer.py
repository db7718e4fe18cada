"""Cells without an optimizer step, in numbers: pipelines, remote calls, inference, backward passes, collectives."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ddp_notebook.observe.tables.matching import Numbers, RowSource, label_of
from ddp_notebook.observe.tables.parts import CellPart
from ddp_notebook.observe.tables.ring_buffer import select
from ddp_notebook.records.names import readable
from ddp_notebook.records.schema import ORIGINS, RPC_KINDS, SPANS, Rows
from ddp_notebook.records.units import ms, size
from ddp_notebook.records.words import list_ranks

_BACKWARD, _OPTIMIZER, _PIPELINE = map(SPANS.index, ("backward", "optimizer", "pipeline"))
_BACKWARDS = [SPANS.index(kind) for kind in ("backward", "input gradient", "weight gradient")]
_USER = ORIGINS.index("user")
_PASSES = [SPANS.index(kind) for kind in ("forward", "evaluation")]
_INPUT = [SPANS.index(kind) for kind in ("input", "workers")]
_FEWEST_PASSES = 3  # a cell with fewer forward passes, backward passes or batches of a rank may only look at a result
_FEWEST_CALLS = 10  # a cell with fewer collectives of a rank may only collect a result
_MOST_MODELS = 4
_OF_USER = [RPC_KINDS.index(kind) for kind in ("rpc_sync", "rpc_async", "remote")]


def last_without_optimizer(recording: RowSource, since: int) -> int | None:
    """Return the last cell after `since` without an optimizer step that ran a pipeline, remote calls or several passes.

    Forward passes and batches of a loader count if a rank had several of them. Backward passes and collectives do too,
    after a cell with optimizer steps. Without such a cell, the optimizer may be one that is not recorded.

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
    several = [_cells_with(select(spans, np.isin(spans["kind"], kinds)), _FEWEST_PASSES) for kinds in (_PASSES, _INPUT)]
    backwards = select(spans, spans["kind"] == _BACKWARD)
    if since < 0:
        several = [cells[~np.isin(cells, backwards["cell"])] for cells in several]
    else:
        collectives = recording.rows("call")
        collectives = select(collectives, (collectives["cell"] > since) & (collectives["origin"] == _USER))
        several += [_cells_with(backwards, _FEWEST_PASSES), _cells_with(collectives, _FEWEST_CALLS)]
    found = np.concatenate([pipelined, remote, *several]).astype(np.int64)
    found = found[~np.isin(found, spans["cell"][spans["kind"] == _OPTIMIZER])]
    return int(found.max()) if len(found) else None


def _cells_with(rows: Rows, fewest: int) -> Numbers:
    """Return the cells in which a rank has at least `fewest` of these rows."""
    keys, counts = np.unique(rows["cell"].astype(np.int64) << 32 | rows["rank"], return_counts=True)
    cells: Numbers = keys[counts >= fewest] >> 32
    return cells


def did(recording: RowSource, cell: int) -> tuple[str, ...]:
    """Return sentences about the pipeline steps, passes, batches and collectives of a cell; () if it had none.

    Args:
        recording: the recorded tables.
        cell: number of the cell.
    """
    own = CellPart(recording, cell)  # type: ignore[arg-type]  # only its rows are read
    spans = own.rows("span")
    spans = select(spans, spans["end_ns"] >= 0)
    pipelines = tuple(_pipelines(spans))
    spans = select(spans, spans["pipeline"] == 0)
    passes = pipelines or tuple(_passes(own, spans)) or tuple(_batches(own, spans))
    return passes or tuple(_collectives(own))


def _pipelines(spans: Rows) -> Iterator[str]:
    steps = select(spans, spans["kind"] == _PIPELINE)
    if len(steps):
        is_action = (spans["pipeline"] > 0) & (spans["kind"] != _PIPELINE)
        has_backward = bool(np.isin(spans["kind"][is_action], _BACKWARDS).any())
        what = "" if has_backward else " without a backward"
        ranks, counts = np.unique(steps["rank"], return_counts=True)
        yield f"Pipeline: {_counted(counts, 'step')}{what} on {list_ranks(ranks.tolist())}"


def _counted(counts: Numbers, noun: str) -> str:
    """Return the smallest and largest number of something.

    Example:
        >>> _counted(np.array([3, 3]), "step"), _counted(np.array([2, 3]), "pass"), _counted(np.array([1]), "batch")
        ('3 steps', '2 to 3 passes', '1 batch')
    """
    least, most = int(counts.min()), int(counts.max())
    plural = noun if most == 1 else f"{noun}es" if noun.endswith(("s", "ch")) else f"{noun}s"
    return f"{least:,} {plural}" if least == most else f"{least:,} to {most:,} {plural}"


def _passes(own: RowSource, spans: Rows) -> Iterator[str]:
    backwards = select(spans, spans["kind"] == _BACKWARD)
    passes = select(spans, np.isin(spans["kind"], _PASSES))
    if len(backwards):
        ranks, counts = np.unique(backwards["rank"], return_counts=True)
        forwards = f" and {_counted(np.unique(passes['rank'], return_counts=True)[1], 'forward pass')}" * bool(
            len(passes)
        )
        yield f"Passes: {_counted(counts, 'backward pass')}{forwards} on {list_ranks(ranks.tolist())}"
        return
    for name in np.unique(passes["name"]).tolist()[:_MOST_MODELS]:
        rows = select(passes, passes["name"] == name)
        ranks, counts = np.unique(rows["rank"], return_counts=True)
        took = rows["end_ns"] - rows["start_ns"]
        text = (
            f"Inference: {_counted(counts, 'forward pass')} of {readable(own.text(name))} on "
            f"{list_ranks(ranks.tolist())}, median {ms(float(np.median(took)))}"
        )
        if (rows["samples"] > 0).all():
            lasted = rows["end_ns"].max() - rows["start_ns"].min()
            text += f", {int(rows['samples'].sum()) / max(1, lasted) * 1e9:,.0f} samples/s of all ranks"
        yield text


def _batches(own: RowSource, spans: Rows) -> Iterator[str]:
    batches = select(spans, np.isin(spans["kind"], _INPUT) & (spans["samples"] > 0))
    for name in np.unique(batches["name"]).tolist()[:_MOST_MODELS]:
        rows = select(batches, batches["name"] == name)
        ranks, counts = np.unique(rows["rank"], return_counts=True)
        yield (
            f"Input: {_counted(counts, 'batch')} of {readable(own.text(name))} on {list_ranks(ranks.tolist())}, "
            f"{int(rows['samples'].sum()):,} samples. Forward passes of models without DDP and FSDP are not recorded"
        )


def _collectives(own: RowSource) -> Iterator[str]:
    calls = own.rows("call")
    calls = select(calls, (calls["origin"] == _USER) & (calls["end_ns"] >= 0))
    for op in np.unique(calls["op"]).tolist()[:_MOST_MODELS]:
        rows = select(calls, calls["op"] == op)
        ranks, counts = np.unique(rows["rank"], return_counts=True)
        sizes = np.maximum(rows["nbytes_in"], rows["nbytes_out"])
        each = (
            size(int(sizes.min()))
            if sizes.min() == sizes.max()
            else f"{size(int(sizes.min()))} to {size(int(sizes.max()))}"
        )
        yield (
            f"Communication: {_counted(counts, 'call')} of {own.text(op)} on {list_ranks(ranks.tolist())}, {each} "
            f"each, median {ms(float(np.median(rows['end_ns'] - rows['issue_ns'])))}"
        )


def instead_of(recording: RowSource, cell: int, older: int | None) -> str:
    """Return the first sentence of the report on a cell without an optimizer step.

    Args:
        older: the last cell with optimizer steps; None: there is none.
    """
    spans = recording.rows("span")
    label = label_of(recording, cell)
    first = f"{label} ran no optimizer step"
    if ((spans["cell"] == cell) & (spans["kind"] == _BACKWARD)).any():  # it may have changed the parameters by itself
        first = f"No optimizer step of {label} was recorded"
    if older is None:
        return first
    return (
        f"{first}. The last cell with steps is {label_of(recording, older)}, and "
        f"session.report({older}) shows its report"
    )
