"""Growth of the ranks' resident memory: when it began, and ranks that grow alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ddp_notebook.observe.tables.ring_buffer import select
from ddp_notebook.observe.tables.store import Store
from ddp_notebook.records.schema import SPANS, Rows
from ddp_notebook.records.units import ms, size

_OPTIMIZER = SPANS.index("optimizer")
_BEGUN = 0.05  # share of the growth below which the memory counts as not yet grown
_LEAST_BYTES = 64 << 20  # a smaller growth is not told
_FEWEST = 10  # samples, one per second
_FEWEST_LIVE = 20  # the same while the cell runs, when a list may still be freed
_MOST_SAMPLES = 1 << 16
_PARTS = 4  # the lowest memory must grow from quarter to quarter of the samples
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
        if grown[rank] >= _LEAST_BYTES and _is_steady(memory):
            steady.append(rank)
    if len(steady) != 1 or len(grown) < 2:
        return None
    (alone,) = steady
    if any(bytes_ > _ALONE * grown[alone] for rank, bytes_ in grown.items() if rank != alone):
        return None
    return growth_of(rows, alone)


def _is_steady(memory: npt.NDArray[np.int64]) -> bool:
    """Return whether most samples are above the one before, and the memory does not fall back between them.

    Example:
        >>> _is_steady(np.arange(20)), _is_steady(np.arange(20) % 7)
        (True, False)
    """
    lowest = [int(part.min()) for part in np.array_split(memory, _PARTS)]
    return bool((np.diff(memory) > 0).mean() >= _RISING and (np.diff(lowest) > 0).all())


class MemoryOfCell:
    """Samples of the ranks' memory since the second optimizer step of a running cell. Each call reads new rows only.

    Args:
        store: receives the rows of the ranks.
        cell: number of the cell.
    """

    def __init__(self, store: Store, cell: int) -> None:
        self._rings = store.rings["span"], store.rings["resource"]
        self._cell = cell
        self._at = [ring.end for ring in self._rings]
        self._since_ns: dict[int, int] = {}  # end of the second step, by rank
        self._samples: list[Rows] = []

    def growing_alone(self) -> Growth | None:
        """Read the new rows, and return the only rank whose memory grows, see `growing_alone`."""
        (spans, self._at[0], _), (samples, self._at[1], _) = (
            ring.since(at) for ring, at in zip(self._rings, self._at, strict=True)
        )
        is_step = (spans["kind"] == _OPTIMIZER) & (spans["cell"] == self._cell) & (spans["step"] >= 1)
        for rank, end_ns in zip(spans["rank"][is_step].tolist(), spans["end_ns"][is_step].tolist(), strict=True):
            self._since_ns.setdefault(rank, end_ns)
        if not self._since_ns:
            return None
        since_ns = np.full(len(samples), np.iinfo(np.int64).max)
        for rank, begin_ns in self._since_ns.items():
            since_ns[samples["rank"] == rank] = begin_ns
        self._samples.append(select(samples, samples["time_ns"] >= since_ns))
        rows = np.concatenate(self._samples)[-_MOST_SAMPLES:]
        self._samples = [rows]
        counts = np.unique(rows["rank"], return_counts=True)[1]
        return growing_alone(rows) if len(counts) > 1 and counts.min() >= _FEWEST_LIVE else None
