"""The calls that this rank has made and that have not returned: what it waits for, in words."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_SHORTEST_S = 0.5  # a wait that is worth a word


@dataclass(frozen=True, slots=True)
class Call:
    """One of them."""

    function: str
    to: str  # "worker1 (rank 1)"
    thread: int  # that has made it
    since_s: float  # monotonic


class Calls:
    """All of them. From any thread."""

    def __init__(self) -> None:
        self.made = 0  # so far
        self._under_way: dict[int, Call] = {}
        self._numbers = itertools.count(1)

    def begin(self, function: str, to: str) -> Callable[..., None]:
        """A call is made. Returns what its end is told to."""
        number = self.made = next(self._numbers)
        self._under_way[number] = Call(function, to, threading.get_ident(), time.monotonic())

        def end(*_: object) -> None:
            self._under_way.pop(number, None)

        return end

    @contextmanager
    def during(self, function: str, to: str) -> Iterator[None]:
        """The block is a call."""
        end = self.begin(function, to)
        try:
            yield
        finally:
            end()

    def words(self, thread: int) -> str:
        """What this thread has waited for longest: `"waits for train on worker1 (rank 1), 12 s"`; "" if for nothing."""
        mine = [call for call in list(self._under_way.values()) if call.thread == thread]
        if not mine or (waited_s := time.monotonic() - mine[0].since_s) < _SHORTEST_S:
            return ""
        return f"waits for {mine[0].function} on {mine[0].to}, {waited_s:.0f} s"
