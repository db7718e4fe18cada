"""The calls that this rank has made and that have not returned: what it waits for, in words."""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

INVOKES = tuple(  # torch's functions that send a call
    f"_invoke_{way}_{what}" for way in ("rpc", "remote") for what in ("builtin", "python_udf", "torchscript")
)
_SHORTEST_S = 0.5  # a wait that is worth a word
_TORCHS = "torch.distributed.rpc.api"  # where the functions are that it calls for itself
_HELPERS = {"_call_method", "call_method", "_remote_method", "_async_on_rref"}  # of torch's tutorials


@dataclass(frozen=True, slots=True)
class Call:
    """One of them."""

    function: str
    to: str  # "worker1 (rank 1)"
    agent: str  # that it was sent to; "": it is what a cell calls, and sends calls of its own
    cell: int  # that it was made for
    thread: int  # that has made it
    since_s: float  # monotonic


class Calls:
    """All of them. From any thread.

    Args:
        is_over: tells whether nobody waits for a call any more.
    """

    def __init__(self, is_over: Callable[[Call], bool]) -> None:
        self.made = 0  # so far
        self._is_over = is_over
        self._under_way: dict[int, Call] = {}
        self._numbers = itertools.count(1)
        self._waits = itertools.count(-1, -1)  # the same, of what is no call

    def begin(self, function: str, to: str, agent: str = "", cell: int = 0) -> Callable[[Any], object]:
        """A call is made. Returns what is called at its end, with anything: no function of Python's, which would cost a
        thread of the agent's 20 us."""
        number = self.made = next(self._numbers)
        return self._begin(number, Call(function, to, agent, cell, threading.get_ident(), time.monotonic()))

    def _begin(self, number: int, call: Call) -> Callable[[Any], object]:
        self._under_way[number] = call
        return functools.partial(self._under_way.pop, number)

    @contextmanager
    def during(self, function: str, to: str, *, is_call: bool = True) -> Iterator[None]:
        """The block is a call, or waits for workers without one."""
        if is_call:
            end = self.begin(function, to)
        else:
            end = self._begin(next(self._waits), Call(function, to, "", 0, threading.get_ident(), time.monotonic()))
        try:
            yield
        finally:
            end(None)

    def not_awaited(self, agents: Container[str], stopped: Container[int]) -> int:
        """How many have not returned for which no `shutdown` waits. Of `rpc.remote` none returns whose callee has
        ended: torch's own callback raises then, before all later ones and before its agent counts the call as over.

        Args:
            agents: of the workers that there are; others have ended, or are of an earlier `init_rpc`.
            stopped: cells that were.
        """
        sent = [call for call in list(self._under_way.values()) if call.agent]
        return sum(call.agent not in agents or call.cell in stopped for call in sent)

    def oldest(self, thread: int) -> dict[str, Any] | None:
        """What this thread has waited for longest, as JSON; None: nothing."""
        mine = [one for one in list(self._under_way.items()) if one[1].thread == thread]
        number, call = next((one for one in mine if not self._is_over(one[1])), (0, None))
        if call is None or (waited_s := time.monotonic() - call.since_s) < _SHORTEST_S:
            return None
        return {"function": call.function, "to": call.to, "number": max(0, number), "since_s": waited_s}

    def words(self, thread: int) -> str:
        """The same: `"waits for train on worker1 (rank 1), call 7, 12 s"`; "" if for nothing."""
        if (told := self.oldest(thread)) is None:
            return ""
        number = f", call {told['number']}" * bool(told["number"])
        return f"waits for {told['function']} on {told['to']}{number}, {told['since_s']:.0f} s"

    def awaited(self, thread: int) -> str:
        """Whose answer this thread waits for: `"worker1 (rank 1)"`; "" if for nobody's."""
        return next((call.to for call in list(self._under_way.values()) if call.thread == thread), "")


def name_of(function: Any, args: Any) -> tuple[str, bool]:
    """What a cell calls a function, also through a reference's proxy or a helper of its own; whether it is one that
    torch calls for itself."""
    name = str(getattr(function, "__qualname__", type(function).__name__))
    if name.startswith("_local_invoke") and len(args) > 1:
        return str(args[1]), False
    if name in _HELPERS and args and callable(args[0]):
        return str(getattr(args[0], "__qualname__", name)), False
    return name, getattr(function, "__module__", "") == _TORCHS
