"""Logged numbers that were NaN or infinite until the end of a cell."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddp_notebook.observe.views import Metric
from ddp_notebook.records.names import readable
from ddp_notebook.records.words import list_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class BadMetric:
    """A logged number that was not finite on some ranks, from a value to the last one of the cell."""

    name: str
    first: Mapping[int, int]  # step of the first such value, by rank
    last_finite: Mapping[int, int | None]  # step of the last finite value of these ranks; None: no value was finite
    value: float  # the first such value
    time_ns: int  # its time
    finite_ranks: tuple[int, ...]  # ranks whose last value is finite
    is_given: bool  # the program has passed the steps

    @property
    def step(self) -> int:
        return min(self.first.values())

    @property
    def ranks(self) -> list[int]:
        """Ranks with the first such value."""
        return [rank for rank, step in sorted(self.first.items()) if step == self.step]

    @property
    def was_finite(self) -> bool:
        return any(step is not None for step in self.last_finite.values())

    def __str__(self) -> str:
        kind = "NaN" if math.isnan(self.value) else "infinite"
        others: dict[int, list[int]] = {}
        for rank, step in sorted(self.first.items()):
            if step != self.step:
                others.setdefault(step, []).append(rank)
        parts = [
            f"on {_whose(ranks, len(self.first), len(others))} at {step:,}" for step, ranks in sorted(others.items())
        ]
        if self.finite_ranks:
            parts.append(f"never on {list_ranks(self.finite_ranks)}")
        count = len(self.first) + len(self.finite_ranks)
        whose = f"all {count} ranks" if len(self.ranks) == count > 1 else list_ranks(self.ranks)
        return ", ".join([f"{readable(self.name)} was {kind} first on {whose} at step {self.step:,}", *parts])


def _whose(ranks: list[int], count: int, steps: int) -> str:
    return "all others" if steps == 1 and len(ranks) > 1 and count > 2 else list_ranks(ranks)


def bad_metrics(metrics: Mapping[str, Metric]) -> list[BadMetric]:
    """Return the metrics of a cell that were not finite at its end, in the order of their first such value.

    Args:
        metrics: logged values of one cell.

    Example:
        >>> import numpy as np
        >>> loss = Metric(
        ...     name="loss", ranks=np.array([0, 1, 0, 1]), steps=np.array([0, 0, 1, 1]), is_given=np.zeros(4, bool),
        ...     values=np.array([1, 1, np.nan, 2.0]), times_ns=np.arange(4), cells=np.ones(4), units=np.zeros(4),
        ... )
        >>> print(bad_metrics({"loss": loss})[0])
        loss was NaN first on rank 0 at step 1, never on rank 1
    """
    found = [one for name, metric in metrics.items() if (one := _bad_metric(name, metric)) is not None]
    return sorted(found, key=lambda one: one.time_ns)


def _bad_metric(name: str, metric: Metric) -> BadMetric | None:
    is_finite = np.isfinite(metric.values)
    if is_finite.all():
        return None
    first: dict[int, int] = {}
    last_finite: dict[int, int | None] = {}
    finite_ranks: list[int] = []
    earliest: tuple[int, int] | None = None  # time and row
    order = np.lexsort((metric.times_ns, metric.ranks))
    ranks, begins = np.unique(metric.ranks[order], return_index=True)
    for rank, rows in zip(ranks.tolist(), np.split(order, begins[1:]), strict=True):
        finite = np.flatnonzero(is_finite[rows])
        at = int(finite[-1]) + 1 if len(finite) else 0  # the first value after the last finite one
        if at == len(rows):
            finite_ranks.append(rank)
            continue
        first[rank] = int(metric.steps[rows[at]])
        last_finite[rank] = int(metric.steps[rows[at - 1]]) if at else None
        found = int(metric.times_ns[rows[at]]), int(rows[at])
        earliest = found if earliest is None else min(earliest, found)
    if earliest is None:
        return None
    step = min(first.values())
    # Clocks of ranks differ a little, so the step decides.
    bad: Any = np.flatnonzero(~is_finite & (metric.steps == step))
    return BadMetric(
        name=name,
        first=first,
        last_finite=last_finite,
        value=float(metric.values[bad[0] if len(bad) else earliest[1]]),
        time_ns=earliest[0],
        finite_ranks=tuple(finite_ranks),
        is_given=bool(metric.is_given[earliest[1]]),
    )
