"""Questions to ranks, and their answers, which come in an I/O thread."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from ddp_notebook.events import Message

_MOST_OPEN = 1000
_CHECK_S = 0.5


class Questions:
    """Sends messages that carry a request number, and hands their answers to whoever waits.

    Args:
        send: sends a message to a rank.
        check: raises when a rank can no longer answer.
    """

    def __init__(self, send: Callable[[int, Message], None], check: Callable[[int], None]) -> None:
        self._send = send
        self._check = check
        self._numbers = itertools.count(1)
        self._open: dict[int, Future[Any]] = {}

    def ask(self, rank: int, make: Callable[[int], Message]) -> Future[Any]:
        """Ask a rank. `make` gets the request number."""
        number = next(self._numbers)
        future: Future[Any] = Future()
        self._open[number] = future
        while len(self._open) > _MOST_OPEN:  # of ranks that never answered
            self._open.pop(next(iter(self._open)))
        self._send(rank, make(number))
        return future

    def ask_all(self, ranks: Iterable[int], make: Callable[[int], Message]) -> dict[int, Any]:
        """Ask several ranks and wait for all answers.

        Raises:
            SessionBrokenError: one of them died.
        """
        asked = {rank: self.ask(rank, make) for rank in ranks}
        return {rank: self.wait_for(rank, future) for rank, future in asked.items()}

    def ask_for(self, ranks: Iterable[int], make: Callable[[int], Message], timeout_s: float) -> dict[int, Any]:
        """Ask several ranks. Returns the answers that come in time."""
        asked = {rank: self.ask(rank, make) for rank in ranks}
        deadline = time.monotonic() + timeout_s
        answers = {}
        for rank, future in asked.items():
            try:
                answers[rank] = future.result(max(0.0, deadline - time.monotonic()))
            except FutureTimeoutError:
                continue
        return answers

    def wait_for(self, rank: int, future: Future[Any]) -> Any:
        """The answer of a rank, however long it takes, as long as it lives."""
        while True:
            try:
                return future.result(timeout=_CHECK_S)
            except FutureTimeoutError:
                self._check(rank)

    def on_answer(self, request: int, answer: Message) -> None:
        """An answer has come."""
        future = self._open.pop(request, None)
        if future is not None:
            future.set_result(answer)
