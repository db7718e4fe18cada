"""The run queue: cells run on the ranks one after another, in the order of their slots."""

from __future__ import annotations

import threading

import pytest

from ddp_notebook.run.cells.run_queue import GivenUpError, QueueSlot, RunQueue
from tests.conftest import wait_until


def test_slots_run_in_the_order_of_their_creation():
    turn, had = RunQueue(), []
    places = [QueueSlot(turn, job=number) for number in range(4)]

    def use(place: QueueSlot) -> None:
        with place:
            had.append(place.job)

    threads = [threading.Thread(target=use, args=(place,)) for place in reversed(places)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert had == [0, 1, 2, 3]
    with turn.if_free() as is_free:
        assert is_free


def test_a_slot_that_starts_during_if_free_is_left_again(monkeypatch):
    turn = RunQueue()
    owner, give_up = QueueSlot(turn), turn.give_up

    def give_up_late(place: QueueSlot) -> bool:
        turn.leave(owner)
        return give_up(place)

    monkeypatch.setattr(turn, "give_up", give_up_late)
    with turn.if_free() as is_free:
        assert is_free
    with turn.if_free() as is_free:
        assert is_free


def test_one_that_is_given_up_lets_the_next_one_through():
    turn = RunQueue()
    first, second, third = (QueueSlot(turn, job=number) for number in (1, 2, 3))
    ended: list[str] = []

    def wait() -> None:
        try:
            with second:
                ended.append("had its turn")
        except GivenUpError:
            ended.append("given up")

    thread = threading.Thread(target=wait)
    thread.start()
    assert (third.ahead, turn.waiting_jobs) == ([1, 2], [2, 3])
    assert second.give_up() and not second.give_up() and not first.give_up()
    thread.join(5)
    assert ended == ["given up"] and third.ahead == [1]
    with first, turn.if_free() as is_free:
        assert not is_free
    assert third.wait_is_over.is_set() and turn.waiting_jobs == []


def test_one_that_is_next_is_before_all_who_wait():
    turn = RunQueue()
    first, second = QueueSlot(turn, job=1), QueueSlot(turn, job=2)
    urgent = QueueSlot(turn, is_next=True)
    assert (urgent.ahead, second.ahead) == ([1], [1])
    with first:
        assert not urgent.wait_is_over.is_set()
    assert urgent.wait_is_over.is_set() and not second.wait_is_over.is_set()


def test_a_turn_that_raises_is_over():
    turn = RunQueue()
    with pytest.raises(ZeroDivisionError), turn:
        1 / 0  # noqa: B018
    done = threading.Event()

    def use() -> None:
        with turn:
            done.set()

    threading.Thread(target=use).start()
    wait_until(done.is_set)
