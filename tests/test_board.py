"""Boards, on which the ranks of a group compare their calls. Ranks are threads here, each with its own board."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # exported at run time

from ddp_notebook.rank.group.guard import memory_board
from ddp_notebook.rank.group.guard.board import MARK_BITS
from ddp_notebook.rank.group.guard.guard import PrivateBoard
from ddp_notebook.rank.group.guard.memory_board import MemoryBoard
from ddp_notebook.rank.group.held_time import CLOCK
from tests.conftest import wait_until

ROOM = 64
TIMEOUT = timedelta(seconds=20)


def on_each(boards: list[Any], work: Callable[[Any], Any]) -> list[Any]:
    """Call `work(board)` for all boards at the same time, and return the results."""
    with ThreadPoolExecutor(len(boards)) as pool:
        return list(pool.map(work, boards))


def make_boards(kind, size: int, timeout: timedelta = TIMEOUT) -> list[Any]:
    make = kind.make if kind is MemoryBoard else kind
    store = HashStore()
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: make(store, rank, size, ROOM, timeout), range(size)))


def comparing(mark: int) -> Callable[[Any], Any]:
    """Return a function that posts a call with this mark, and compares it."""
    return lambda board: board.compare(board.post(mark, True))


@pytest.fixture(params=[MemoryBoard, PrivateBoard], ids=["memory", "private"])
def boards(request) -> Iterator[list[Any]]:
    made = make_boards(request.param, 3)
    yield made
    made.clear()  # gloo's connections end with their groups


def test_equal_marks_are_the_same(boards):
    for number in range(5):
        assert on_each(boards, comparing(number)) == [(True, True)] * 3


def test_one_other_mark_is_told_on_every_rank(boards):
    assert on_each(boards, lambda board: board.compare(board.post(7 + (board.rank == 1), True))) == [(False, True)] * 3
    assert on_each(boards, comparing(7)) == [(True, True)] * 3


def test_everybody_knows_that_one_does_not_block(boards):
    assert on_each(boards, lambda board: board.compare(board.post(7, board.rank != 2))) == [(True, False)] * 3


def test_largest_and_smallest_marks(boards):
    for mark in (0, 2**MARK_BITS - 1):
        assert on_each(boards, comparing(mark)) == [(True, True)] * 3
    assert (
        on_each(boards, lambda board: board.compare(board.post((2**MARK_BITS - 1) * (board.rank == 0), True)))
        == [(False, True)] * 3
    )


def test_calls_that_are_compared_later_and_in_another_order(boards):
    tickets = [[board.post(mark + (board.rank == 2 and mark == 3), False) for mark in range(6)] for board in boards]
    for board, of_board in zip(boards, tickets, strict=True):
        found = {mark: board.compare(of_board[mark]).is_same for mark in (5, 3, 0)}
        assert found == {5: True, 3: False, 0: True}


def test_notes_reach_everybody(boards):
    def swap(board):
        ticket = board.post(1, True)
        board.compare(ticket)
        return board.swap(ticket, b"of " + b"%d" % board.rank * (1 + 20 * board.rank))

    for _ in range(3):
        assert on_each(boards, swap) == [[b"of 0", b"of " + b"1" * 21, b"of " + b"2" * 41]] * 3


@pytest.mark.slow
def test_many_calls_at_full_speed():
    def run(board):
        return [tuple(board.compare(board.post(number % 5, number % 3 > 0))) for number in range(20_000)]

    found = on_each(make_boards(MemoryBoard, 2), run)
    assert found == [[(True, number % 3 > 0) for number in range(20_000)]] * 2


def test_numbers_begin_again():
    boards = make_boards(MemoryBoard, 2)
    for board in boards:  # as after two thousand million calls
        board._posted = memory_board._NUMBER - 3
        for at in range(board.rank * memory_board._DEPTH, (board.rank + 1) * memory_board._DEPTH):
            board._marks[at] = board._posted
    for number in range(8):
        assert on_each(boards, comparing(number)) == [(True, True)] * 2
    assert on_each(boards, lambda board: board.compare(board.post(board.rank, True))) == [(False, True)] * 2


@pytest.mark.parametrize("ahead", [memory_board._DEPTH, 40_000])
def test_a_rank_that_is_far_behind_passes_what_was_overwritten(ahead):
    fast, slow = make_boards(MemoryBoard, 2)
    of_slow = slow.post(1, True)
    of_fast = [fast.post(2 + number, False) for number in range(ahead + 1)]
    assert slow.compare(of_slow) == (True, False)  # the result cannot be known, and the other rank does not wait for it
    assert fast.compare(of_fast[0]) == (True, False)
    if ahead == memory_board._DEPTH:
        assert not slow.compare(slow.post(99, False)).is_same


def test_a_cut_ends_waits_on_every_rank():
    boards = make_boards(MemoryBoard, 3)
    errors: list[str] = []

    def wait(board):
        try:
            board.compare(board.post(1, True))
        except RuntimeError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=wait, args=(board,)) for board in boards[:2]]
    for thread in threads:
        thread.start()
    wait_until(lambda: all(board._posted for board in boards[:2]))
    wait_until(lambda: all(boards[2]._waits[rank] for rank in (0, 1)))
    boards[2].cut()
    for thread in threads:
        thread.join(10)
    assert len(errors) == 2 and all("Connection closed by peer" in error for error in errors)


def test_a_wait_is_interrupted_if_another_rank_was_interrupted():
    """However late the interrupt arrives: an interrupted rank has not failed."""
    waiting, spoiling = make_boards(MemoryBoard, 2)
    main, places = threading.main_thread().ident or 0, []

    def interrupt():
        spoiling.spoil()
        wait_until(lambda: sys._current_frames()[main].f_code.co_name == "_refuse_if_cut")
        places.append(waiting.is_cut)
        signal.raise_signal(signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        waiting.compare(waiting.post(1, True))
    thread.join()
    assert places == [True]


def test_a_wait_fails_if_only_another_rank_was_interrupted(monkeypatch):
    monkeypatch.setattr(memory_board, "_INTERRUPT_S", 0.1)
    waiting, spoiling = make_boards(MemoryBoard, 2)
    ticket = waiting.post(1, True)
    spoiling.spoil()
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        waiting.compare(ticket)
    spoiling.cut()
    waiting.spoil()  # it stays cut
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        waiting.post(1, True)


def test_who_has_not_come_in_time_is_named():
    boards = make_boards(MemoryBoard, 3, timedelta(seconds=0.2))
    boards[2].post(1, True)
    boards[0].set_timeout(timedelta(seconds=0.1))
    with pytest.raises(RuntimeError, match=r"Timed out waiting 0.1 s for rank 1 of the group"):
        boards[0].compare(boards[0].post(1, True))
    with pytest.raises(RuntimeError, match="Connection closed by peer"):  # it must not continue without the others
        boards[1].compare(boards[1].post(1, True))


def test_without_files_in_memory_no_rank_has_such_a_board(monkeypatch):
    monkeypatch.setattr(memory_board, "_new_file", lambda _: -1)
    assert make_boards(MemoryBoard, 3) == [None] * 3


def test_no_rank_has_a_memory_board_without_a_machine_id(monkeypatch):
    def machine():
        raise FileNotFoundError("/proc/sys/kernel/random/boot_id")

    monkeypatch.setattr(memory_board, "_machine", machine)
    assert make_boards(MemoryBoard, 3) == [None] * 3


@pytest.mark.parametrize("other", ["elsewhere 1", "here 2"], ids=["machine", "container"])
def test_no_rank_has_a_memory_board_if_one_is_on_another_machine(monkeypatch, other):
    seen = iter(["here 1", other])  # rank 0 calls first, when it sends its place
    monkeypatch.setattr(memory_board, "_machine", lambda: next(seen, "here 1"))
    assert make_boards(MemoryBoard, 3) == [None] * 3


def test_a_file_that_is_another_ones_is_not_written_to(tmp_path):
    """In this test `/proc` belongs to another namespace, whose processes have the same numbers."""
    with (tmp_path / "other").open("wb+") as file:
        file.write(bytes(100_000))
        file.flush()
        place = memory_board._place_of(file.fileno())
        assert memory_board._mapped(place, 100_000) is not None
        *kept, inode = place.split()
        assert memory_board._mapped(" ".join([*kept, str(int(inode) + 1)]), 100_000) is None


@pytest.mark.parametrize("is_memory", [True, False], ids=["memory", "private"])
def test_a_debugger_holds_the_timeout_of_a_board(is_memory):
    """A board in memory uses a clock that stops. A gloo group gives its operations a long timeout."""
    boards = make_boards(MemoryBoard if is_memory else PrivateBoard, 2, timedelta(seconds=0.4))
    for board in boards:
        board.hold_timeout(True)
    if is_memory:
        CLOCK.hold(True)

    def late(board: Any) -> Any:
        if board.rank == 1:
            time.sleep(0.9)
        return board.compare(board.post(7, True))

    try:
        assert on_each(boards, late) == [(True, True)] * 2
    finally:
        CLOCK.hold(False)
        CLOCK.reset()
    if not is_memory:
        for board in boards:
            board.hold_timeout(False)
        with pytest.raises(RuntimeError, match=r"imed out waiting 400ms|Connection closed"):
            boards[0].compare(boards[0].post(7, True))
    boards.clear()
