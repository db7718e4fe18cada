"""What the time of a step is shared among besides its phases: the blocks that the user has named, and the cores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from ddp_notebook.observe.tables.matching import RowSource
from ddp_notebook.observe.views import Step
from ddp_notebook.records.schema import SPANS
from ddp_notebook.records.units import ms, percent

_MOST_BLOCKS = 5
_BLOCK = SPANS.index("block")


def blocks_of(recording: RowSource, steps: Sequence[Step]) -> tuple[str, ...]:
    """A note about the named blocks of these steps, the longest first, mean of steps and ranks; none without one."""
    spans = recording.rows("span")
    spans = spans[(spans["kind"] == _BLOCK) & (spans["end_ns"] >= 0)]
    if not len(spans) or not steps:
        return ()
    total: Counter[str] = Counter()
    for rank in {step.rank for step in steps}:
        own = spans[spans["rank"] == rank]
        mine = sorted((step for step in steps if step.rank == rank), key=lambda step: step.start_ns)
        at = np.searchsorted([step.start_ns for step in mine], own["start_ns"], "right") - 1
        inside = (at >= 0) & (own["start_ns"] < np.array([step.end_ns for step in mine])[np.maximum(at, 0)])
        for name in np.unique(own["name"][inside]).tolist():
            rows = own[inside & (own["name"] == name)]
            total[recording.text(name)] += int((rows["end_ns"] - rows["start_ns"]).sum())
    whole = sum(step.duration_ns for step in steps)
    told = [f"{name} {ms(ns / len(steps))} ({percent(ns / whole)})" for name, ns in total.most_common(_MOST_BLOCKS)]
    more = f", and {len(total) - _MOST_BLOCKS} more" if len(total) > _MOST_BLOCKS else ""
    return (f"Named blocks of a step: {', '.join(told)}{more}",) if told else ()


def cores(recording: RowSource, ranks: Sequence[int]) -> tuple[str, ...]:
    """A note for each machine that has more of these ranks than cores, and no GPUs for them."""
    rows = recording.rows("resource")
    rows = rows[(rows["cores"] > 0) & (rows["gpu_allocated_bytes"] < 0)]
    known = {rank: int(rows["cores"][rows["rank"] == rank][-1]) for rank in ranks if (rows["rank"] == rank).any()}
    of_host: dict[str, list[int]] = {}
    for rank in known:
        of_host.setdefault(recording.hosts[rank] if rank < len(recording.hosts) else "", []).append(rank)
    notes = []
    for host, own in of_host.items():
        count = max(known[rank] for rank in own)
        if len(own) > count:
            where = f" of {host}" if host else ""
            notes.append(
                f"{len(own)} ranks on {count} core{'s' * (count != 1)}{where}: they compute by turns, so times say as "
                "much about that as about the program"
            )
    return tuple(notes)
