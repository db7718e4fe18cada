"""A ring keeps the last rows, and each reader follows it at its own pace."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

from ddp_notebook.observe.tables.ring_buffer import RingBuffer, select
from ddp_notebook.records.schema import CALL, METRIC
from tests.observe.batches import there

INT = np.dtype("<i8")


@pytest.mark.slow
def test_readers_get_every_row_once_or_the_number_of_lost_rows():
    for seed in range(50):
        chance = random.Random(seed)
        capacity = chance.randint(1, 600)
        ring, written = RingBuffer(INT, capacity), 0
        places, lost = [0, 0, 0], [0, 0, 0]
        seen: list[list[int]] = [[], [], []]
        for _ in range(60):
            count = chance.choice([0, 1, chance.randint(0, 40), chance.randint(0, 3 * capacity)])
            ring.append(np.arange(written, written + count))
            written += count
            reader = chance.randrange(3)
            rows, places[reader], missed = ring.since(places[reader])
            seen[reader] += rows.tolist()
            lost[reader] += missed

            assert ring.end == written
            assert ring.first == max(0, written - capacity)
            assert ring.all().tolist() == list(range(ring.first, written))
            assert len(seen[reader]) + lost[reader] == written
        for one in seen:
            assert one == sorted(set(one))


def test_its_memory_grows_with_its_rows_and_then_stays():
    ring = RingBuffer(METRIC, 10_000)
    at_first = ring.nbytes
    ring.append(np.zeros(5000, METRIC))
    grown = ring.nbytes
    sizes = set()
    for _ in range(100):
        ring.append(np.zeros(999, METRIC))
        sizes.add(ring.nbytes)

    assert at_first < 20_000
    assert 5000 * METRIC.itemsize <= grown <= 10_000 * METRIC.itemsize
    assert max(sizes) == 10_000 * METRIC.itemsize
    assert len(ring) == 10_000


def test_rows_by_their_index():
    ring = RingBuffer(METRIC, 300)
    rows = np.zeros(1000, METRIC)
    rows["step"] = np.arange(1000)
    for at in range(0, 1000, 70):
        ring.append(rows[at : at + 70])

    assert ring.row(699) is None
    assert [int(there(ring.row(index))["step"]) for index in (700, 850, 999)] == [700, 850, 999]
    assert ring.row(1000) is None
    assert ring.row(-1) is None


def test_what_a_reader_holds_does_not_change():
    ring = RingBuffer(INT, 4)
    ring.append(np.arange(4))
    held, row = ring.all(), RingBuffer(METRIC, 1)
    row.append(np.ones(1, METRIC))
    one = there(row.row(0))
    ring.append(np.arange(4, 8))
    row.append(np.zeros(1, METRIC))

    assert held.tolist() == [0, 1, 2, 3]
    assert one["value"] == 1


def test_an_index_from_somewhere_else_does_no_harm():
    ring = RingBuffer(INT, 4)
    ring.append(np.arange(6))

    assert ring.since(100)[0].tolist() == []
    assert ring.since(100)[1:] == (6, 0)
    assert ring.since(-5)[1:] == (6, 2)


def test_a_ring_that_can_hold_nothing_is_refused():
    with pytest.raises(ValueError, match=r"^capacity must be at least 1, got 0$"):
        RingBuffer(INT, 0)


def test_one_thread_writes_while_others_read():
    ring, done = RingBuffer(INT, 1000), threading.Event()
    wrong: list[list[int]] = []

    def read() -> None:
        place = total = 0
        while not (done.is_set() and place == ring.end):
            rows, place, lost = ring.since(place)
            total += len(rows) + lost
            if len(rows) and rows.tolist() != list(range(place - len(rows), place)):
                wrong.append(rows.tolist())
        if total != ring.end:
            wrong.append([total])

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for at in range(0, 100_000, 50):
        ring.append(np.arange(at, at + 50))
    done.set()
    for reader in readers:
        reader.join()

    assert wrong == []


@pytest.mark.parametrize("dtype", [METRIC, CALL])
def test_selected_rows_are_those_that_an_index_gives(dtype):
    chance = np.random.default_rng(1)
    rows = np.frombuffer(chance.bytes(40 * dtype.itemsize), dtype)
    for some in (rows, rows[::3], rows[:0]):
        for chosen in (chance.random(len(some)) < 0.5, chance.permutation(len(some)), np.zeros(0, int)):
            found = select(some, chosen)
            assert found.dtype == dtype and found.tobytes() == some[chosen].tobytes()
            assert not len(found) or not np.shares_memory(found, some)
