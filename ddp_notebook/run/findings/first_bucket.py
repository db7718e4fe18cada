"""The first recorded gradients that were NaN or infinite before they were averaged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ddp_notebook.observe.tables.matching import RowSource
from ddp_notebook.observe.tables.ring_buffer import select

NAME = "not-finite"
_OWN = 0  # side of a value: the input of a call


def needs_gradients(facts: Mapping[int, Sequence[Sequence[Any]]], ranks: Sequence[int]) -> bool:
    """Return whether the losses of all ranks were not finite in the same first step. Gradients may have the cause."""
    steps = {rank: step for rank, own in facts.items() for name, step, _ in own if name == NAME}
    return len(ranks) > 1 and set(steps) == set(ranks) and len(set(steps.values())) == 1


def with_bucket(
    facts: Mapping[int, Sequence[Sequence[Any]]], recording: RowSource, cell: int
) -> dict[int, list[Sequence[Any]]]:
    """Return the facts with the first rank, step and bucket that had such a gradient, if it was recorded."""
    step, found = _first(recording, cell)
    changed: dict[int, list[Sequence[Any]]] = {}
    for rank, own in facts.items():
        changed[rank] = [one for one in own if one[0] != NAME]
        if not found:
            changed[rank] += [[name, at, {"everywhere": True}] for name, at, _ in own if name == NAME]
        elif rank in found:
            model, bucket = found[rank]
            changed[rank].append([NAME, step, {"model": model, "bucket": bucket}])
    return changed


def _first(recording: RowSource, cell: int) -> tuple[int, dict[int, tuple[str, int]]]:
    """Return the first step, counted from 1, and the model and first bucket of each rank with such a gradient."""
    calls, values = recording.rows("call"), recording.rows("value")
    calls = select(calls, (calls["cell"] == cell) & (calls["bucket"] >= 0))
    values = select(values, (values["side"] == _OWN) & (values["nans"] + values["infs"] > 0))
    keys = {(int(rank), int(call)) for rank, call in zip(values["rank"], values["call"], strict=True)}
    is_bad = np.array([(int(one["rank"]), int(one["call"])) in keys for one in calls], bool)
    calls = select(calls, is_bad) if len(calls) else calls
    if not len(calls):
        return 0, {}
    step = int(calls["step"].min())
    found: dict[int, tuple[str, int]] = {}
    for one in calls[calls["step"] == step]:
        found.setdefault(int(one["rank"]), (recording.text(int(one["module"])), int(one["bucket"])))
    return step + 1, found
