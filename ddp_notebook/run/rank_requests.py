"""Questions to ranks, and their answers, which arrive in an I/O thread."""

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

_MOST_LAPSING = 20  # open questions to one rank that may never be answered: two a second, for as long as anybody waits
_CHECK_S = 0.5
_SLOW_S = (2.0, 10.0)  # without an answer, until that is reported


class Questions:
    """Sends messages that carry a request number, and hands their answers to whoever waits.

    Args:
        send: sends a message to a rank.
        check: raises when a rank can no longer answer.
        on_slow: told of a rank that has not answered, for how many seconds, and whether its answer is due, see
            `wait_for`: at most twice for each answer.
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
        self._open: dict[int, tuple[int, Future[Any]]] = {}  # asked rank and answer, by request number
        self._lapsing: dict[int, deque[int]] = {}  # by rank: its open questions that may be forgotten, oldest first

    def begin_at(self, number: int) -> None:
        """Count questions from there: others ask the same ranks, and hear all answers."""
        self._numbers = itertools.count(number)

    def ask(self, rank: int, make: Callable[[int], Message], *, lapses: bool = False) -> Future[Any]:
        """Ask a rank.

        Args:
            make: makes the message; gets the request number.
            lapses: the caller waits for a limited time only, so the question may be forgotten.
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
        """Ask several ranks and wait for all answers.

        Raises:
            SessionBrokenError: one of them died.
        """
        asked = {rank: self.ask(rank, make) for rank in ranks}
        return {rank: self.wait_for(rank, future) for rank, future in asked.items()}

    def ask_for(self, ranks: Iterable[int], make: Callable[[int], Message], timeout_s: float) -> dict[int, Any]:
        """Ask several ranks. Returns the answers that arrive in time."""
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
        """Wait for the answer of a rank as long as the rank lives.

        Args:
            check: called often; an exception from it ends the wait.
            is_due: the rank computes the answer at once. If not, as for a question that it answers after its next
                optimizer step, a late answer is no sign of trouble.
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
        """What takes each message that answers a question."""
        return dict.fromkeys(get_args(Answer), self.on_answer)

    def on_answer(self, rank: int, answer: Answer) -> None:
        """An answer of a rank has come. Dropped if the question was not asked, was forgotten, or was asked of another
        rank: one on a host that was broken into must not choose the value of another."""
        with self._lock:
            asked, future = self._open.get(answer.request, (rank, None))
            if future is None or (asked != rank and isinstance(answer, Pulled)):
                return
            del self._open[answer.request]
        future.set_result(answer)
