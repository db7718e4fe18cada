"""A slow rank is reported with the slow part of its steps. `tests/long` repeats this."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

import pytest

from ddp_notebook import api
from tests.recording.slow import PHASES
from tests.recording.witness import cell_of_last


@pytest.fixture(scope="module")
def session(waiting_host_server) -> Iterator[Any]:
    """Four ranks."""
    waiting_host_server()
    with api.start(4) as running:
        running.run("import time; from tests.recording.slow import train", quiet=True)
        yield running


@pytest.mark.parametrize(("rank", "phase"), [(k + 1, phase) for k, phase in enumerate(PHASES)])
def test_a_slow_rank_is_named(session, rank, phase):
    session.run(f"train({phase!r} if rank == {rank} else '')", quiet=True)
    found = session.recording.straggler()
    assert found is not None and (found.rank, found.phase) == (rank, phase), found
    assert 35e6 < found.lost_ns < 70e6 and found.share > 0.8, found
    assert found.evidence.startswith(f"rank {rank} came last in") and f"its {phase} takes" in found.evidence


def test_ranks_that_are_equally_fast(session):
    session.run("train('')", quiet=True)
    assert session.recording.steps(cell_of_last(session)), "there was something to judge"
    assert session.recording.straggler() is None


def test_a_rank_that_comes_late_to_collectives_of_the_user(session):
    """The other ranks wait in the guard, before the operation itself. The time between its calls has no known parts."""
    session.run(
        "for _ in range(12):\n    time.sleep(0.05 * (rank == 3))\n    x = torch.ones(8); dist.all_reduce(x)", quiet=True
    )
    recording, cell = session.recording, cell_of_last(session)
    found = recording.straggler(cell)
    assert found is not None and (found.rank, found.phase) == (3, "between"), found
    blocked_ms = {
        rank: [one.blocked_ns / 1e6 for one in recording.collectives(cell=cell, rank=rank)] for rank in range(4)
    }
    for rank in range(3):
        assert median(blocked_ms[rank]) > 40, blocked_ms[rank]
    assert median(blocked_ms[3]) < 40, blocked_ms[3]
