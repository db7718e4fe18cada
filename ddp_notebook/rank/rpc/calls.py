"""The calls that this rank has made and that have not returned: what it waits for, in words."""

from __future__ import annotations

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
    thread: int  # that has made it
    since_s: float  # monotonic


class Calls:
    """All of them. From any thread.

    Args:
        is_lost: tells whether the process has ended that has this agent.
    """

    def __init__(self, is_lost: Callable[[str], bool]) -> None:
        self.made = 0  # so far
        self._is_lost = is_lost
        self._under_way: dict[int, Call] = {}
        self._numbers = itertools.count(1)

    def begin(self, function: str, to: str, agent: str = "") -> Callable[..., None]:
        """A call is made. Returns what its end is told to."""
        number = self.made = next(self._numbers)
        self._under_way[number] = Call(function, to, agent, threading.get_ident(), time.monotonic())

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

    def sent_elsewhere(self, agents: Container[str]) -> int:
        """How many have not returned that were sent to others than these agents: to processes that have ended, or that
        an earlier `init_rpc` has brought together.

        Of `rpc.remote` none returns whose callee has ended: torch's own callback raises then, before all later ones
        and before its agent counts the call as over.
        """
        sent_to = [call.agent for call in list(self._under_way.values())]
        return sum(bool(agent) and agent not in agents for agent in sent_to)

    def words(self, thread: int) -> str:
        """What this thread has waited for longest: `"waits for train on worker1 (rank 1), call 7, 12 s"`; "" if for
        nothing."""
        mine = [(number, call) for number, call in list(self._under_way.items()) if call.thread == thread]
        mine = [(number, call) for number, call in mine if not self._is_lost(call.agent)]
        if not mine or (waited_s := time.monotonic() - mine[0][1].since_s) < _SHORTEST_S:
            return ""
        number, call = mine[0]
        return f"waits for {call.function} on {call.to}, call {number}, {waited_s:.0f} s"


def name_of(function: Any, args: Any) -> tuple[str, bool]:
    """What a cell calls a function, also through a reference's proxy or a helper of its own; whether it is one that
    torch calls for itself."""
    name = str(getattr(function, "__qualname__", type(function).__name__))
    if name.startswith("_local_invoke") and len(args) > 1:
        return str(args[1]), False
    if name in _HELPERS and args and callable(args[0]):
        return str(getattr(args[0], "__qualname__", name)), False
    return name, getattr(function, "__module__", "") == _TORCHS
