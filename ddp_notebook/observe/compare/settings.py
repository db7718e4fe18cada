"""Changes of the conditions of two training runs: ranks, batch, gradients, data loading and memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ddp_notebook.observe.compare.names import renumbered
from ddp_notebook.observe.compare.sides import Side
from ddp_notebook.observe.tables.distinct import distinct
from ddp_notebook.observe.tables.ring_buffer import select
from ddp_notebook.records.names import readable
from ddp_notebook.records.schema import Rows
from ddp_notebook.records.units import size
from ddp_notebook.records.words import list_ranks

_LEAST_SHARE = 0.1  # smallest relative change of memory that counts
_LEAST_BYTES = 100e6
_GPU, _HOST = "GPU memory", "memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A condition that differs between two runs."""

    name: str  # "samples in a step"
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.name}: {self.after} instead of {self.before}"


def settings(a: Side, b: Side) -> tuple[Setting, ...]:
    """Return the conditions that differ: number of ranks, samples, bytes of gradients, buckets and loaders."""
    pairs = {
        "ranks": (str(a.run.ranks), str(b.run.ranks)),
        "samples of a rank in a step": (_samples(a), _samples(b)),
        "gradients in buckets of DDP in a step": (_bytes(a.run.gradient_nbytes), _bytes(b.run.gradient_nbytes)),
        "gradient buckets in a step": (_buckets(a), _buckets(b)),
    }
    first, second = _loaders(a), _loaders(b)
    for name in [*first, *(name for name in second if name not in first)]:
        for key in ("workers", "persistent workers", "prefetched batches"):
            pairs[f"{key} of {readable(name)}"] = first.get(name, {}).get(key, ""), second.get(name, {}).get(key, "")
    return tuple(
        Setting(name=name, before=before, after=after)
        for name, (before, after) in pairs.items()
        if before and after and before != after
    )


def _samples(side: Side) -> str:
    known = side.kept.samples[side.kept.samples >= 0]
    if not len(known):
        return ""
    low, high = int(known.min()), int(known.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _bytes(nbytes: int) -> str:
    return size(nbytes) if nbytes else "none"


def _buckets(side: Side) -> str:
    rows = side.rows.rows("call")
    chosen = np.flatnonzero((rows["bucket"] >= 0) & np.isin(rows["step"], side.kept.number))
    if not len(chosen):
        return ""
    _, of = distinct(rows["rank"][chosen], rows["step"][chosen])
    return str(int(np.median(np.bincount(of))))


def _loaders(side: Side) -> dict[str, dict[str, str]]:
    rows = side.rows.rows("loader")
    names = renumbered(side.rows.text(number) for number in np.unique(rows["name"]).tolist())
    return {
        names[side.rows.text(int(row["name"]))]: {
            "workers": str(int(row["workers"])),
            "persistent workers": "yes" if row["is_persistent"] else "no",
            "prefetched batches": str(int(row["prefetch"])) if row["prefetch"] >= 0 else "",
        }
        for row in rows[np.argsort(rows["time_ns"], kind="stable")]
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryChange:
    """Largest memory of ranks during both runs, mean of these ranks."""

    ranks: tuple[int, ...]
    kind: str  # "memory" or "GPU memory"
    before: float
    after: float

    def __str__(self) -> str:
        return f"{self.kind} of {list_ranks(self.ranks)}: {size(self.after)} instead of {size(self.before)}"


def memory(a: Side, b: Side) -> tuple[MemoryChange, ...]:
    """Return the changes of the largest memory. A change counts if it exceeds 10 %, 100 MB, and the growth within
    either run.
    """
    first, second = _rows_of(a), _rows_of(b)
    found = []
    for kind, column in ((_HOST, "rss_bytes"), (_GPU, "gpu_allocated_bytes")):
        changed: dict[bool, list[tuple[int, float, float]]] = {}
        for rank in sorted(set(a.every.ranks) & set(b.every.ranks)):
            own = [rows[column][(rows["rank"] == rank) & (rows[column] >= 0)] for rows in (first, second)]
            if not len(own[0]) or not len(own[1]):
                continue
            before, after = (float(values.max()) for values in own)
            grows = sum(float(values.max() - values.min()) for values in own)
            if abs(after - before) > max(_LEAST_SHARE * max(before, after), _LEAST_BYTES) + grows:
                changed.setdefault(after > before, []).append((rank, before, after))
        for ranks in changed.values():
            numbers, befores, afters = zip(*ranks, strict=True)
            found.append(
                MemoryChange(
                    ranks=tuple(numbers), kind=kind, before=float(np.mean(befores)), after=float(np.mean(afters))
                )
            )
    return tuple(found)


def _rows_of(side: Side) -> Rows:
    """Return the samples of memory between the first step and the last."""
    rows = side.rows.rows("resource")
    begin, end = int(side.every.start_ns.min()), int(side.every.end_ns.max())
    return select(rows, (rows["time_ns"] >= begin) & (rows["time_ns"] <= end))
