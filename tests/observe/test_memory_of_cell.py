"""Growth of one rank's memory while its cell runs: leaks are found, and memory that all ranks need is not reported."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ddp_notebook.observe.report.memory_growth import Growth, MemoryOfCell
from ddp_notebook.observe.tables.store import Store
from ddp_notebook.records.schema import RESOURCE, SPAN, SPANS

S, MB = 10**9, 10**6
CELL = 7


def _feed(store: Store, rank: int, second: int, memory: float, cell: int = CELL) -> None:
    """Add a sample of a rank's memory, and an optimizer step, which ends in the middle of each second."""
    sample, step = np.zeros(1, RESOURCE), np.zeros(1, SPAN)
    sample["rank"], sample["time_ns"], sample["rss_bytes"] = rank, second * S, int(memory)
    step["rank"], step["kind"], step["cell"], step["step"] = rank, SPANS.index("optimizer"), cell, second
    step["start_ns"], step["end_ns"] = second * S, second * S + S // 2
    store.rings["span"].append(step)
    store.rings["resource"].append(sample)


def _found(*memory: Callable[[int], float], seconds: int = 60, cell: int = CELL) -> tuple[int, Growth] | None:
    """Return the second of the report and the growth. The arguments are the memory of each rank by second, in MB."""
    store = Store()
    watched = MemoryOfCell(store, CELL)
    for second in range(seconds):
        for rank, of_rank in enumerate(memory):
            _feed(store, rank, second, of_rank(second) * MB, cell)
        if second % 5 == 4 and (found := watched.growing_alone()) is not None:
            return second, found
    return None


def _flat(second: int) -> float:
    return 1000


def _leaks(second: int) -> float:
    return 1000 + 10 * second


def test_a_leak_of_one_rank_is_found_after_20_samples():
    found = _found(_flat, _leaks)
    assert found is not None and found[0] == 24
    growth = found[1]
    assert (growth.rank, growth.before, growth.most) == (1, 1030 * MB, 1240 * MB)
    assert str(growth) == "from 1.0 GB to 1.2 GB in 21.0 s"


@pytest.mark.parametrize(
    "memory",
    [
        (_leaks, _leaks),
        (lambda s: 1000 + 300 * min(s, 3), lambda s: 1000 + 300 * min(s, 3)),  # all ranks grow in the first steps
        (_flat, lambda s: 1000 + 500 * (s >= 2)),  # one rank allocates its optimizer states
        (lambda s: 1000 + 15 * min(s, 30), lambda s: 1000 + 12 * min(s, 35)),  # caches of the first epoch
        (_flat, lambda s: 1000 + 40 * (s % 9)),  # a list that is freed after each epoch
        (_flat, lambda s: 1000 + 10 * s if s < 14 else 1000),  # a list that is freed once
        (_flat, lambda s: 1000 + s),  # 59 MB
        (_flat, lambda s: 1000 + 100 * math.sin(s)),
        (_leaks,),
    ],
)
def test_memory_that_is_needed_is_not_reported(memory):
    assert _found(*memory) is None


def test_steps_of_another_cell_do_not_count():
    assert _found(_flat, _leaks, cell=CELL - 1) is None


def test_only_new_rows_are_read(monkeypatch):
    store = Store()
    for second in range(100):
        _feed(store, 0, second, 1000 * MB)
    watched = MemoryOfCell(store, CELL)
    read: list[int] = []

    def counted(since: Callable[[int], Any]) -> Callable[[int], Any]:
        def read_rows(at: int) -> Any:
            found = since(at)
            read.append(len(found[0]))
            return found

        return read_rows

    for ring in (store.rings["span"], store.rings["resource"]):
        monkeypatch.setattr(ring, "since", counted(ring.since))
    for second in range(100, 103):
        _feed(store, 0, second, 1000 * MB)
        watched.growing_alone()
    assert read == [1] * 6
