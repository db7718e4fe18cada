"""Compares a recording with torch's profiler and DDP's timers of the same run, see `on_rank.Witness`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ddp_notebook.observe.recording import Recording
from ddp_notebook.observe.views import Collective
from ddp_notebook.records.schema import SPANS, Rows

# Ranges of the gloo operations on two ranks. gloo has no reduce_scatter and no monitored barrier.
RANGES = {
    "all_reduce": ["all_reduce"],
    "all_reduce_coalesced": ["all_reduce"],
    "broadcast": ["broadcast"],
    "reduce": ["reduce"],
    "gather": ["gather"],
    "scatter": ["scatter"],
    "all_gather": ["all_gather"],
    "all_gather_single": ["all_gather"],
    "all_gather_coalesced": ["all_gather"],
    "all_gather_single_coalesced": ["all_gather"],
    "reduce_scatter": ["all_reduce", "all_reduce"],
    "reduce_scatter_single": ["all_reduce"],
    "reduce_scatter_single_coalesced": ["all_reduce"],
    "all_to_all": ["all_to_all"],
    "all_to_all_single": ["all_to_all"],
    "barrier": ["barrier"],
    "monitored_barrier": ["send", "recv"],
    "send": ["send"],
    "recv": ["recv"],
}
_NEAR = 0.1  # share of the span; at least `_NEAR_NS`
_NEAR_NS = 200_000
_FEWEST = 8  # fewest operations of one kind for a meaningful median


def cell_of_last(session: Any) -> int:
    """Return the number of the last cell with recorded calls."""
    return int(session.recording.rows("call")["cell"].max())


def operations(recording: Recording, cell: int, rank: int) -> list[Collective]:
    """Return the operations that torch has executed, in the order of their issue, without the rows of whole comm
    hooks."""
    found = [one for one in recording.collectives(cell=cell, rank=rank) if not one.op.startswith("comm hook")]
    return sorted(found, key=lambda one: one.issue_ns)


def expect_agreement(look: Callable[[], list[str]]) -> None:
    """Require one run of three without large differences, because other load can delay a thread.

    Args:
        look: Function that runs it, and returns the differences.
    """
    for _ in range(3):
        if not (off := look()):
            return
    raise AssertionError("\n".join(off))


def operations_off(session: Any) -> list[str]:
    """Return operations of the last cell whose end differs from that in the profiler (the ranks' variable `ranges`).

    The profiler's range starts when a thread of gloo takes the operation, the recorded one when it is issued. The
    numbers of operations of each kind must be equal.
    """
    cell, seen, off = cell_of_last(session), session.pull("ranges"), []
    for rank in range(session.world_size):
        ours: dict[str, list[Collective | None]] = defaultdict(list)
        for one in operations(session.recording, cell, rank):
            assert one.state == "done", one
            kinds = ["recvAnySource"] if one.op == "recv" and one.peer is None else RANGES[one.op]
            for kind in kinds:
                ours[kind].append(one if len(kinds) == 1 else None)
        theirs: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for kind, start_ns, end_ns in sorted(seen[rank], key=lambda one: one[1]):
            if kind.startswith("gloo:"):
                theirs[kind.removeprefix("gloo:")].append((start_ns, end_ns))
        counts, counted = ({kind: len(some) for kind, some in all.items()} for all in (ours, theirs))
        assert counts == counted, f"rank {rank}: {counts}, with the profiler {counted}"
        for kind in ours:
            pairs = [(one, range) for one, range in zip(ours[kind], theirs[kind], strict=True) if one is not None]
            if len(pairs) < _FEWEST:
                continue
            mine = [(one.end_ns or 0) - one.issue_ns for one, _ in pairs]
            off += spans_off(mine, [end_ns - one.issue_ns for one, (_, end_ns) in pairs], f"{kind} on rank {rank}")
            early_ns = [one.issue_ns - start_ns for one, (start_ns, _) in pairs]
            if np.median(early_ns) > _NEAR_NS:
                off.append(f"{kind} on rank {rank} begins before it is issued: {early_ns}")
    return off


def spans_off(ours: Sequence[float], theirs: Sequence[float], what: str, share: float = 0.5) -> list[str]:
    """Return a message if spans in nanoseconds, compared one by one, differ by more than 10 % and 0.2 ms.

    Args:
        share: Share of spans that must agree. Others may have lost their core before the time was read.
    """
    pairs = np.array([ours, theirs], np.float64)  # (2, n)
    allowed = np.maximum(_NEAR * np.abs(pairs[1]), _NEAR_NS)
    if np.quantile(np.abs(pairs[0] - pairs[1]) / allowed, share) <= 1:
        return []
    return [f"{what}, ours and theirs in ms: {(pairs.T / 1e6).round(2).tolist()}"]


def spans(recording: Recording, cell: int, rank: int, kind: str) -> Rows:
    """Return (n,) the rows of one kind of span, in their order."""
    rows = recording.rows("span")
    rows = rows[(rows["cell"] == cell) & (rows["rank"] == rank) & (rows["kind"] == SPANS.index(kind))]
    return rows[np.argsort(rows["start_ns"])]
