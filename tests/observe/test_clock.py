"""The offset of a rank's clock, estimated from round trips: the error never exceeds its bound."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from ddp_notebook.observe.clock import Clock

MS, S = 10**6, 10**9


def exchange(clock, at_ns, offset_ns, there_ns, back_ns, **more):
    """Add a request that takes `there_ns` and a reply that takes `back_ns`."""
    rank_ns = at_ns + there_ns + offset_ns
    clock.add(1, sent_ns=at_ns, rank_ns=rank_ns, received_ns=at_ns + there_ns + back_ns, **more)


def error_ns_of(clock: Clock) -> int:
    error_ns = clock.error_ns(1)
    assert error_ns is not None
    return error_ns


@pytest.mark.slow
def test_an_offset_is_never_wrong_by_more_than_it_says():
    for seed in range(200):
        chance = random.Random(seed)
        clock, offset_ns = Clock(), chance.randint(-(10**15), 10**15)
        for second in range(chance.randint(1, 100)):
            there, back = (round(chance.expovariate(1 / (2 * MS))) for _ in range(2))
            exchange(clock, second * S, offset_ns, there, back)

            assert abs(clock.offset_ns(1) - offset_ns) <= error_ns_of(clock)


@pytest.mark.long
def test_an_offset_that_drifts_is_followed():
    for seed in range(8):
        chance = random.Random(seed)
        drift, begin = chance.uniform(-50e-6, 50e-6), chance.randint(10**9, 10**15)
        clock = Clock()
        for second in range(600):
            offset = begin + round(second * S * drift)
            there, back = (50_000 + round(chance.expovariate(1 / 200_000)) for _ in range(2))
            exchange(clock, second * S, offset, there, back)

            assert abs(clock.offset_ns(1) - offset) <= error_ns_of(clock) + 100
        # ten minutes later the start is still known: the clocks have drifted by up to 30 ms since
        for second in range(0, 600, 7):
            truth = second * S
            of_rank = np.array([truth + begin + round(truth * drift)])
            assert abs(int(clock.to_notebook(1, of_rank)[0]) - truth) < MS


def test_many_round_trips_estimate_a_jittery_clock_within_2_ms():
    chance, clock = random.Random(1), Clock()
    for second in range(60):
        there, back = (100_000 + round(chance.expovariate(1 / (5 * MS))) for _ in range(2))
        exchange(clock, second * S, 12_345, there, back)

    assert error_ns_of(clock) < 2 * MS
    assert abs(clock.offset_ns(1) - 12_345) < 2 * MS


def test_ranks_of_the_notebooks_host_have_its_clock():
    clock = Clock()
    for second in range(10):
        exchange(clock, second * S, 0, 3 * MS, MS, same_clock=True)
    times = np.array([5, -1, 7])

    assert (clock.offset_ns(1), clock.error_ns(1)) == (0, 0)
    assert clock.shifted() == []
    assert clock.to_notebook(1, times).tolist() == [5, -1, 7]


def test_a_clock_wrongly_declared_the_same_is_estimated():
    """A container with its own time namespace has the boot id of the host."""
    clock = Clock()
    exchange(clock, 0, 5 * S, MS, MS, same_clock=True)

    assert (clock.offset_ns(1), clock.error_ns(1)) == (5 * S, MS)
    assert clock.shifted() == [1]


def test_times_that_are_unknown_stay_so():
    clock = Clock()
    clock.add(1, sent_ns=0, rank_ns=1010, received_ns=20)

    assert clock.to_notebook(1, np.array([-1, 1000, 2000])).tolist() == [-1, 0, 1000]


def test_of_a_rank_that_was_never_asked_nothing_is_known():
    clock = Clock()

    assert (clock.offset_ns(7), clock.error_ns(7)) == (0, None)
    assert clock.to_notebook(7, np.array([3])).tolist() == [3]


def test_an_answer_that_was_overtaken_changes_nothing():
    clock = Clock()
    clock.add(1, sent_ns=0, rank_ns=100 * S, received_ns=10)
    clock.add(1, sent_ns=0, rank_ns=1 * S, received_ns=2)

    assert clock.offset_ns(1) == 100 * S - 5


def test_an_answer_before_its_question_is_refused():
    with pytest.raises(ValueError, match=r"^the reply of rank 1 arrived at 5 ns, before its request was sent at 9 ns$"):
        Clock().add(1, sent_ns=9, rank_ns=0, received_ns=5)


def test_a_day_of_round_trips_takes_no_more_memory_than_an_hour():
    clock = Clock()
    for minute in range(3 * 24 * 60):
        exchange(clock, minute * 60 * S, minute * 10, 1000, 1000)

    assert len(json.dumps(clock.to_json())) < 100_000
    at = 36 * 60 * 60 * S
    assert abs(int(clock.to_notebook(1, np.array([at + 36 * 60 * 10]))[0]) - at) < 10_000


def test_what_is_known_survives_a_file():
    clock = Clock()
    for second in range(100):
        exchange(clock, second * S, 10**12 + second * 1000, 1000, 2000)
    clock.add(0, sent_ns=0, rank_ns=5, received_ns=10, same_clock=True)

    again = Clock.from_json(json.loads(json.dumps(clock.to_json())))

    times = np.arange(0, 100 * S, S) + 10**12
    assert again.to_notebook(1, times).tolist() == clock.to_notebook(1, times).tolist()
    assert (again.offset_ns(1), again.error_ns(1)) == (clock.offset_ns(1), clock.error_ns(1))
    assert (again.offset_ns(0), again.error_ns(0), again.shifted()) == (0, 0, [1])


def test_a_rank_on_another_host_is_learnt_anew():
    clock = Clock()
    clock.add(1, sent_ns=0, rank_ns=100 * S, received_ns=10)
    before = clock.part(1)
    clock.add(1, sent_ns=20, rank_ns=30, received_ns=40)

    assert clock.offset_ns(1) == 0 and before.offset_ns(1) == 100 * S - 5
