"""Repeated resizes during a training run whose losses equal those of an undisturbed one."""

from __future__ import annotations

import statistics
import time

import pytest

from tests.resizing import TRAINING, losses

pytestmark = pytest.mark.long

_SIZES = (2, 6, 5, 1, 3)  # from 4
_SHRINK_S, _GROW_S = 0.3, 1.0  # medians; growing copies 4 M parameters and Adam's state, 96 MB, to each new rank


def test_losses_are_those_of_an_uninterrupted_run(make_session, tally):
    training = TRAINING.format(width=1000)
    session = make_session(4)
    session.run(training, quiet=True)
    wanted = losses(session, 2 * (1 + len(_SIZES)))
    session.stop()
    took: dict[int, list[float]] = {size: [] for size in _SIZES}
    for _ in tally(20, "4, 2, 6, 5, 1, 3 ranks: the losses equal those of an uninterrupted run"):
        session = make_session(4)
        session.run(training, quiet=True)
        found = losses(session, 2)
        for size in _SIZES:
            began = time.monotonic()
            session.ranks.resize(size)
            took[size].append(time.monotonic() - began)
            found += losses(session, 2)
        assert found == pytest.approx(wanted, rel=1e-9)
        session.stop()
    medians = {size: statistics.median(times) for size, times in took.items()}
    print("seconds for each size, median and most:", {n: (round(medians[n], 2), round(max(took[n]), 2)) for n in took})
    assert max(medians[size] for size in (2, 5, 1)) < _SHRINK_S
    assert max(medians[size] for size in (6, 3)) < _GROW_S


def test_a_hundred_times(make_session, tally):
    """Any rank leaves, including rank 0, with and without a client of ipyparallel."""
    session = make_session(2)
    session.run("kept = rank", quiet=True)
    for at in tally(100, "the group works after a resize, for any leaving rank"):
        size = 1 + (5 * at + 3) % 4
        without = [0] if at % 3 == 0 and session.world_size > 1 else None
        session.ranks.resize(size, without=without)
        result = session.run("x = torch.ones(1); dist.all_reduce(x); int(x)", quiet=True, timeout_s=30)
        assert [result[rank].result for rank in range(size)] == [str(size)] * size
        if at % 10 == 0:
            assert session.client[:]["rank"] == list(range(size))
    assert len(session.ranks.pids()) == session.world_size
