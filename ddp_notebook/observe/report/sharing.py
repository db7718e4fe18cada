"""Time that the blocks named by the user take of a step, in addition to its phases."""

from __future__ import annotations

from collections import Counter

import numpy as np

from ddp_notebook.observe.steps.steps import StepTable
from ddp_notebook.observe.tables.matching import RowSource
from ddp_notebook.observe.tables.ring import select
from ddp_notebook.records.names import readable
from ddp_notebook.records.schema import SPANS
from ddp_notebook.records.units import ms, percent

_MOST_BLOCKS = 5
_BLOCK = SPANS.index("block")


def blocks_of(recording: RowSource, steps: StepTable) -> tuple[str, ...]:
    """A note about the named blocks of these steps, the longest first, mean of steps and ranks; none without one."""
    spans = recording.rows("span")
    spans = select(spans, (spans["kind"] == _BLOCK) & (spans["end_ns"] >= 0))
    if not len(spans) or not len(steps):
        return ()
    total: Counter[str] = Counter()
    for rank in steps.ranks:
        own, mine = select(spans, spans["rank"] == rank), steps[steps.rank == rank]
        order = np.argsort(mine.start_ns, kind="stable")
        at = np.searchsorted(mine.start_ns[order], own["start_ns"], "right") - 1
        inside = (at >= 0) & (own["start_ns"] < mine.end_ns[order][np.maximum(at, 0)])
        for name in np.unique(own["name"][inside]).tolist():
            rows = select(own, inside & (own["name"] == name))
            total[recording.text(name)] += int((rows["end_ns"] - rows["start_ns"]).sum())
    whole = int(steps.duration_ns.sum())
    most = total.most_common(_MOST_BLOCKS)
    told = [f"{readable(name)} {ms(ns / len(steps))} ({percent(ns / whole)})" for name, ns in most]
    more = f", and {len(total) - _MOST_BLOCKS} more" if len(total) > _MOST_BLOCKS else ""
    return (f"Named blocks of a step: {', '.join(told)}{more}",) if told else ()
