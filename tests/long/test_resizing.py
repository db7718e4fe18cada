"""Repeated resizes during a training run whose losses equal those of an undisturbed one."""

from __future__ import annotations

import os
import signal
import statistics
import threading
import time
from random import Random

import pytest

from ddp_notebook import Keep
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


@pytest.mark.parametrize("kept", [False, True], ids=["plain", "kept"])
def test_a_press_at_any_moment_of_a_resize_ends_it(make_session, tally, kept):
    """Each press raises, and the session has the old or the new number of ranks. The next cell works."""
    session = make_session(2, **({"keep": Keep(hours=1)} if kept else {}))
    session.run("kept = rank", quiet=True)
    random, took = Random(0), dict.fromkeys((2, 3), 0.0)
    for size in (3, 2, 3, 2):
        began = time.monotonic()
        session.ranks.resize(size)
        took[size] = time.monotonic() - began
    for _ in tally(100, f"one press during a resize ends it, {'kept' if kept else 'plain'}"):
        size = 3 if session.world_size == 2 else 2
        press = threading.Timer(random.uniform(0.0, took[size]), os.kill, (os.getpid(), signal.SIGINT))
        press.start()
        with pytest.raises(KeyboardInterrupt):
            session.ranks.resize(size)
            press.join()  # the resize has ended before the press
        press.join()
        assert session.world_size in (2, 3)
        result = session.run("x = torch.ones(1); dist.all_reduce(x); int(x)", quiet=True, timeout_s=30)
        assert [result[rank].result for rank in result.ranks] == [str(session.world_size)] * session.world_size
