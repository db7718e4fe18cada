"""Requests to ranks, and their answers, which arrive in an I/O thread."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, get_args

from ddp_notebook.messages.encoding import Message
from ddp_notebook.messages.ranks import Checked, ClockReply, Pulled, Pushed, Vitals
from ddp_notebook.messages.script_abort import WasCut
from ddp_notebook.run.message_handlers import Handlers

Answer = Checked | ClockReply | Pulled | Pushed | Vitals | WasCut

_MOST_LAPSING = 20  # open requests to one rank that may never be answered: two per second during a wait
_CHECK_S = 0.5
_SLOW_S = (2.0, 10.0)  # times without an answer after which this is reported


class Questions:
    """Sends messages with a request number, and returns their answers.

    Args:
        send: sends a message to a rank.
        check: raises an error if a rank can no longer answer.
        on_slow: called at most twice per answer if a rank is late: rank, seconds, and whether the answer is due, see
            `wait_for`.
    """

    def __init__(
        self,
        send: Callable[[int, Message], None],
        check: Callable[[int], None],
        on_slow: Callable[[int, float, bool], object] = lambda *_: None,
    ) -> None:
        self._send = send
        self._check = check
        self._on_slow = on_slow
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._open: dict[int, tuple[int, Future[Any]]] = {}  # requested rank and answer, by request number
        self._lapsing: dict[int, deque[int]] = {}  # open requests that may be forgotten, by rank, oldest first

    def begin_at(self, number: int) -> None:
        """Set the first request number: other notebooks send requests to the same ranks, and receive all answers."""
        self._numbers = itertools.count(number)

    def ask(self, rank: int, make: Callable[[int], Message], *, lapses: bool = False) -> Future[Any]:
        """Send a request to a rank. Return the future answer.

        Args:
            make: creates the message from the request number.
            lapses: the caller waits for a limited time, so the request may be forgotten.
        """
        number = next(self._numbers)
        future: Future[Any] = Future()
        with self._lock:
            self._open[number] = rank, future
            if lapses:
                lapsing = self._lapsing.setdefault(rank, deque())
                while lapsing and (len(lapsing) >= _MOST_LAPSING or lapsing[0] not in self._open):
                    self._open.pop(lapsing.popleft(), None)
                lapsing.append(number)
        self._send(rank, make(number))
        return future

    def ask_all(self, ranks: Iterable[int], make: Callable[[int], Message]) -> dict[int, Any]:
        """Send requests to several ranks, and wait for all answers.

        Raises:
            SessionBrokenError: a rank died.
        """
        asked = {rank: self.ask(rank, make) for rank in ranks}
        return {rank: self.wait_for(rank, future) for rank, future in asked.items()}

    def ask_for(self, ranks: Iterable[int], make: Callable[[int], Message], timeout_s: float) -> dict[int, Any]:
        """Send requests to several ranks, and return the answers that arrive in time."""
        asked = {rank: self.ask(rank, make, lapses=True) for rank in ranks}
        deadline = time.monotonic() + timeout_s
        answers = {}
        for rank, future in asked.items():
            try:
                answers[rank] = future.result(max(0.0, deadline - time.monotonic()))
            except FutureTimeoutError:
                continue
        return answers

    def wait_for(
        self, rank: int, future: Future[Any], check: Callable[[], None] = lambda: None, *, is_due: bool = True
    ) -> Any:
        """Wait for the answer of a rank while the rank is alive.

        Args:
            check: called often; its exceptions end the wait.
            is_due: True if the rank answers immediately. If False, a late answer is not reported, for example if the
                rank answers after its next optimizer step.
        """
        began_s, slow_s = time.monotonic(), [*_SLOW_S]
        while True:
            try:
                return future.result(timeout=_CHECK_S)
            except FutureTimeoutError:
                self._check(rank)
                check()
            if slow_s and time.monotonic() - began_s > slow_s[0]:
                self._on_slow(rank, slow_s.pop(0), is_due)

    @property
    def handlers(self) -> Handlers:
        """Return the handlers of answers."""
        return dict.fromkeys(get_args(Answer), self.on_answer)

    def on_answer(self, rank: int, answer: Answer) -> None:
        """Handle an answer. Drop it if its request is unknown, was forgotten, or was sent to another rank.

        A rank on a compromised host must not choose the value of another rank.
        """
        with self._lock:
            asked, future = self._open.get(answer.request, (rank, None))
            if future is None or (asked != rank and isinstance(answer, Pulled)):
                return
            del self._open[answer.request]
        future.set_result(answer)
