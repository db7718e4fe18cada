"""Growth of the ranks' resident memory: when it began, and ranks that grow alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ddp_notebook.observe.tables.matching import RowSource
from ddp_notebook.observe.tables.ring_buffer import select
from ddp_notebook.records.schema import SPANS, Rows
from ddp_notebook.records.units import ms, size

_OPTIMIZER = SPANS.index("optimizer")
_BEGUN = 0.05  # share of the growth below which the memory counts as not yet grown
_LEAST_BYTES = 64 << 20  # a smaller growth is not told
_FEWEST = 10  # samples, one per second
_RISING = 0.8  # share of the samples that must be above the one before
_ALONE = 0.1  # other ranks grow by at most this share of the growth


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Growth of a rank's resident memory up to its maximum."""

    rank: int
    begin_ns: int  # last sample before it grew
    end_ns: int  # sample with the maximum
    before: int  # bytes
    most: int

    def __str__(self) -> str:
        return f"from {size(self.before)} to {size(self.most)} in {ms(self.end_ns - self.begin_ns)}"


def growth_of(rows: Rows, rank: int) -> Growth | None:
    """Return the growth up to the maximum of a rank's memory; None if it grew by less than 64 MB.

    Args:
        rows: rows of `records.RESOURCE`.
        rank: number of the rank.

    Example:
        >>> from ddp_notebook.records.schema import RESOURCE
        >>> rows = np.zeros(5, RESOURCE)
        >>> rows["time_ns"], rows["rss_bytes"] = np.arange(5) * 10**9, np.array([1, 1, 1, 4, 9]) * 10**9
        >>> print(growth_of(rows, 0))
        from 1.0 GB to 9.0 GB in 2.00 s
    """
    rows = select(rows, rows["rank"] == rank)
    rows = rows[np.argsort(rows["time_ns"], kind="stable")]
    if len(rows) < 2:
        return None
    memory = rows["rss_bytes"].astype(np.int64)
    top = int(memory.argmax())
    least = int(memory[: top + 1].min())
    most = int(memory[top])
    if most - least < _LEAST_BYTES:
        return None
    low = np.flatnonzero(memory[:top] <= least + _BEGUN * (most - least))
    begin = int(low[-1])
    times = rows["time_ns"]
    return Growth(rank=rank, begin_ns=int(times[begin]), end_ns=int(times[top]), before=int(memory[begin]), most=most)


def growing_alone(rows: Rows) -> Growth | None:
    """Return the only rank whose memory grows steadily while the memory of all others stays; None if there is none.

    Args:
        rows: rows of `records.RESOURCE` of one cell.

    Example:
        >>> from ddp_notebook.records.schema import RESOURCE
        >>> rows = np.zeros(40, RESOURCE)
        >>> rows["rank"], rows["time_ns"] = np.arange(40) % 2, np.arange(40) // 2 * 10**9
        >>> rows["rss_bytes"] = 10**9 + rows["rank"] * np.arange(40) * 10**7
        >>> growing_alone(rows).rank
        1
    """
    grown: dict[int, int] = {}
    steady: list[int] = []
    for rank in np.unique(rows["rank"]).tolist():
        memory = rows["rss_bytes"][rows["rank"] == rank].astype(np.int64)
        if len(memory) < _FEWEST:
            return None
        grown[rank] = int(memory[-1] - memory[0])
        if grown[rank] >= _LEAST_BYTES and (np.diff(memory) > 0).mean() >= _RISING:
            steady.append(rank)
    if len(steady) != 1 or len(grown) < 2:
        return None
    (alone,) = steady
    if any(bytes_ > _ALONE * grown[alone] for rank, bytes_ in grown.items() if rank != alone):
        return None
    return growth_of(rows, alone)


def growing_in_last_cell(recording: RowSource) -> tuple[int, Growth] | None:
    """Return the last cell with optimizer steps, and the only rank whose memory grows since its second step.

    Returns None if no rank grows alone, see `growing_alone`.
    """
    spans = recording.rows("span")
    steps = select(spans, spans["kind"] == _OPTIMIZER)
    if not len(steps):
        return None
    cell = int(steps["cell"].max())
    steps = select(steps, (steps["cell"] == cell) & (steps["step"] >= 1))
    rows = recording.rows("resource")
    if not len(steps):
        return None
    found = growing_alone(select(rows, rows["time_ns"] >= steps["end_ns"].min()))
    return None if found is None else (cell, found)
