"""Batches are received in a separate thread, and dropped ones are counted."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import closing

import pytest

from ddp_notebook.observe import intake as intakes
from ddp_notebook.observe.intake import Intake
from ddp_notebook.observe.recording import Recording
from ddp_notebook.records.codec import Batch, encode
from tests.observe.batches import Rank


class Gate(Recording):
    """A recording that blocks until it is opened."""

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size)
        self.opened, self.reached = threading.Event(), threading.Event()
        self.opened_for_dropped, self.reached_dropped = threading.Event(), threading.Event()

    def _feed(self, batch):
        self.reached.set()
        assert self.opened.wait(10)
        super()._feed(batch)

    def _feed_dropped(self, batch):
        self.reached_dropped.set()
        assert self.opened_for_dropped.wait(10)
        super()._feed_dropped(batch)


def test_batches_come_in_in_their_order():
    recording = Recording(2)
    with closing(Intake(recording)) as intake:
        ranks = [Rank(0), Rank(1)]
        for _ in range(50):
            for rank in ranks:
                intake.put(rank.rank, encode(rank.batch(rank.call(), rank.call("send"))))
        assert intake.flush(10)
        for number in (0, 1):
            assert recording.collectives(rank=number).rows["call"].tolist() == list(range(1, 101))
    assert recording.dropped == {}


def test_what_is_too_much_is_dropped_from_the_front_and_counted():
    recording, rank = Gate(1), Rank(0)
    first = encode(rank.batch(rank.call("all_reduce")))
    with closing(Intake(recording, most_bytes=5000)) as intake:
        intake.put(0, first)
        assert recording.reached.wait(10)
        for number in range(100):  # each text is different
            data = encode(rank.batch(rank.call("send", site=f"cell line {number}"), rank.values(number, 0, [1.0])))
            intake.put(0, data)
            assert intake._nbytes <= 5000
        waits = len(intake._waiting)
        intake.put(0, encode(rank.batch(*(rank.call("recv", site=f"cell line {number}") for number in range(100)))))
        recording.opened_for_dropped.set()
        recording.opened.set()
        assert intake.flush(10)

    calls = recording.collectives()
    assert 0 < waits < 20
    assert [one.op for one in calls] == ["all_reduce", *["recv"] * 100]
    assert [one.site for one in calls][1:] == [f"cell line {number}" for number in range(100)], "no text was lost"
    assert recording.dropped == {0: 200}


def test_one_large_batch_is_taken_all_the_same():
    recording, rank = Recording(1), Rank(0)
    with closing(Intake(recording, most_bytes=10)) as intake:
        intake.put(0, encode(rank.batch(*(rank.call() for _ in range(100)))))
        assert intake.flush(10)
    assert len(recording.collectives()) == 100


def test_damaged_batches_are_told_once_and_end_nothing(caplog):
    recording, rank = Gate(1), Rank(0)
    recording.opened.set()
    with closing(Intake(recording)) as intake, caplog.at_level(logging.WARNING):
        intake.put(0, b"nonsense")
        intake.put(0, encode(rank.batch(rank.call()))[:-1])
        broken = rank.batch(rank.call())
        broken.tables["call"]["rank"] = 0
        intake.put(0, encode(broken))
        assert intake.flush(10)
        assert intake.damaged == {0: 2}
    assert len(recording.collectives()) == 1
    assert [one.getMessage() for one in caplog.records] == [
        "a batch of recorded rows of rank 0 was left out: 8 bytes are no batch"
    ]


def test_a_damaged_batch_that_is_dropped_is_counted_too():
    recording, rank = Gate(1), Rank(0)
    with closing(Intake(recording, most_bytes=100)) as intake:
        intake.put(0, encode(rank.batch(rank.call())))
        assert recording.reached.wait(10)
        intake.put(3, b"nonsense")
        intake.put(0, encode(rank.batch(rank.call())))
        assert intake.damaged == {3: 1}
        recording.opened_for_dropped.set()
        recording.opened.set()
        assert intake.flush(10)
    assert len(recording.collectives()) == 2


def test_flush_waits_for_what_was_put_before_and_no_longer():
    recording, rank = Gate(1), Rank(0)
    with closing(Intake(recording)) as intake:
        assert intake.flush(0)
        intake.put(0, encode(rank.batch(rank.call())))
        assert not intake.flush(0.05)
        seen = []
        waiting = threading.Thread(target=lambda: seen.append((intake.flush(10), len(recording.collectives()))))
        waiting.start()
        recording.opened_for_dropped.set()
        recording.opened.set()
        waiting.join()
        assert seen == [(True, 1)]


def test_requested_or_large_data_is_not_batched_any_longer(monkeypatch):
    monkeypatch.setattr(intakes, "_GATHER_S", 60.0)
    recording, rank = Gate(64), Rank(0)
    recording.opened.set()
    data = [encode(rank.batch(rank.call())) for _ in range(8)]
    with closing(Intake(recording, most_bytes=4 * sum(map(len, data[:4])))) as intake:
        intake.put(0, data[0])
        assert intake.flush(10)
        assert len(recording.collectives()) == 1
        recording.reached.clear()
        for one in data[1:5]:
            assert not recording.reached.is_set()
            intake.put(0, one)
        intake.put(0, data[5])
        assert recording.reached.wait(10)
        assert intake.flush(10)
        intake.put(0, data[6])
    assert len(recording.collectives()) == 7, "closing does not wait either"


def test_flush_waits_for_what_is_left_of_dropped_batches():
    recording, rank = Gate(1), Rank(0)
    with closing(Intake(recording, most_bytes=100)) as intake:
        intake.put(0, encode(rank.batch(rank.call())))
        assert recording.reached.wait(10)
        intake.put(0, encode(rank.batch(rank.call())))
        intake.put(0, encode(rank.batch(rank.call())))  # drops the previous one
        recording.opened.set()
        assert recording.reached_dropped.wait(10)
        assert not intake.flush(0.05)
        assert recording.dropped == {}
        recording.opened_for_dropped.set()
        assert intake.flush(10)
        assert recording.dropped == {0: 1}


def test_a_batch_that_breaks_the_recording_ends_nothing():
    recording, rank = Recording(1), Rank(0)
    with closing(Intake(recording)) as intake:
        intake.put(0, encode(Batch(rank=0, stream=1, texts={1: "x"}, tensors=())))
        recording.store.dropped = None  # type: ignore[assignment]
        intake.put(0, encode(rank.batch(rank.call(), dropped=1)))
        intake.put(0, encode(rank.batch(rank.call())))
        assert intake.flush(10)
        assert intake.damaged == {0: 1}
    assert len(recording.collectives()) == 1


def test_put_never_waits_for_the_thread():
    recording, rank = Gate(1), Rank(0)
    data = [encode(rank.batch(rank.call())) for _ in range(1000)]
    with closing(Intake(recording, most_bytes=50_000)) as intake:
        began = time.monotonic()
        for one in data:
            intake.put(0, one)
        assert time.monotonic() - began < 5
        recording.opened_for_dropped.set()
        recording.opened.set()
    assert len(recording.collectives()) + recording.dropped[0] == 1000


def test_closing_feeds_what_waits_and_ends_the_thread():
    recording, rank = Recording(1), Rank(0)
    intake = Intake(recording)
    for _ in range(200):
        intake.put(0, encode(rank.batch(rank.call())))
    intake.close()

    assert len(recording.collectives()) == 200
    assert not intake._thread.is_alive()
    intake.put(0, encode(rank.batch(rank.call())))
    intake.close()
    assert intake.flush(1)
    assert len(recording.collectives()) == 200


@pytest.mark.slow
@pytest.mark.parametrize("most_bytes", [2000, 1 << 20])
def test_many_ranks_at_once_lose_nothing_that_is_not_counted(most_bytes):
    recording = Recording(8)
    with closing(Intake(recording, most_bytes=most_bytes)) as intake:

        def send(rank):
            for _ in range(200):
                intake.put(rank.rank, encode(rank.batch(rank.call(), rank.call())))

        threads = [threading.Thread(target=send, args=(Rank(number),)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert intake.flush(10)
    for number in range(8):
        assert len(recording.collectives(rank=number)) + recording.dropped.get(number, 0) == 400
    assert {one.op for one in recording.collectives()} == {"all_reduce"}
