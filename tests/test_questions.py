"""Requests to ranks and their answers. These tests need no ranks."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import Future
from typing import Any

import pytest

from ddp_notebook.errors import SessionBrokenError
from ddp_notebook.messages.ranks import Probe, Vitals
from ddp_notebook.run import rank_requests
from ddp_notebook.run.rank_requests import Questions


def probe(request: int) -> Probe:
    return Probe(request=request)


def answer(request: int) -> Vitals:
    return Vitals(request=request, rss_bytes=0, device_bytes=0, running_cell=0, running_s=0.0)


def test_one_that_somebody_waits_for_is_never_forgotten():
    asked = Questions(lambda *_: None, lambda _: None)
    waited = asked.ask(0, probe)
    lapsed = asked.ask(0, probe, lapses=True)
    for _ in range(rank_requests._MOST_LAPSING):
        asked.ask(0, probe, lapses=True)
    asked.on_answer(0, answer(1))
    asked.on_answer(0, answer(2))
    assert waited.result(0).request == 1
    assert not lapsed.done()
    assert len(asked._open) == rank_requests._MOST_LAPSING


def test_all_of_many_ranks_answer_when_all_were_asked():
    asked: list[tuple[int, int]] = []

    def send(rank: int, message: Any) -> None:
        asked.append((rank, message.request))

    many = Questions(send, lambda _: None)
    futures = {rank: many.ask(rank, probe, lapses=True) for rank in range(1500)}
    for rank, number in asked:
        many.on_answer(rank, answer(number))
    assert [future.result(0).request for future in futures.values()] == list(range(1, 1501))
    assert many._open == {}


def test_asking_and_answering_in_many_threads(monkeypatch):
    """Every request is answered or dropped, in any order of requests, answers and dropped requests in the threads."""
    monkeypatch.setattr(rank_requests, "_MOST_LAPSING", 3)
    errors: list[BaseException] = []
    numbers: list[int] = []

    def send(_: int, message: Any) -> None:
        numbers.append(message.request)

    asked = Questions(send, lambda _: None)

    def run(step) -> None:
        try:
            for _ in range(10000):
                step()
        except BaseException as error:
            errors.append(error)

    def answer_one() -> None:
        if numbers:
            number = numbers.pop()
            asked.on_answer(0, answer(number))

    steps = [lambda: asked.ask(0, probe, lapses=True)] * 3 + [answer_one] * 3
    threads = [threading.Thread(target=run, args=(step,)) for step in steps]
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval_s)
    assert errors == []
    assert len(asked._open) <= 3 and asked._open.keys() <= set(asked._lapsing[0])


def test_a_wait_ends_with_the_rank_or_with_a_check(monkeypatch):
    monkeypatch.setattr(rank_requests, "_CHECK_S", 0.01)

    def is_dead(_: int) -> None:
        raise SessionBrokenError("rank 0 died")

    with pytest.raises(SessionBrokenError, match="rank 0 died"):
        Questions(lambda *_: None, is_dead).wait_for(0, Future())

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Questions(lambda *_: None, lambda _: None).wait_for(0, Future(), interrupted)
