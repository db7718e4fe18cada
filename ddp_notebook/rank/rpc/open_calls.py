"""Calls of this rank without an answer, and descriptions of the calls that a thread waits for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any

from ddp_notebook.rank.cell.exceptions import words
from ddp_notebook.rank.remote_calls import NO_RANK, NO_WORKER, Sent
from ddp_notebook.stdlib import itertools, threading, time, weakref

INVOKES = tuple(  # torch functions that send a call
    f"_invoke_{way}_{what}" for way in ("rpc", "remote") for what in ("builtin", "python_udf", "torchscript")
)
_SHORTEST_S = 0.5  # shorter waits are not reported
# Modules whose functions only torch and this package call, not programs.
_NOT_OF_PROGRAMS = "torch.distributed.rpc.api", "ddp_notebook.rank.rpc.rref_values"
_HELPERS = {"_call_method", "call_method", "_remote_method", "_async_on_rref"}  # helper functions of torch tutorials
_TIMEOUTS = "RPCErr:1:", "RPCErr:2:"  # prefixes of errors: a timeout, and a timeout that a test requested
_times: Iterator[int] = iter(time.monotonic_ns, -1)
_Answered = tuple[Sent, int, Any, None]  # call, time of the answer, and future if the call is recorded


class RpcCalls:
    """Open calls of this rank. Thread-safe.

    Args:
        is_over: returns whether no thread waits for a call any more.
    """

    def __init__(self, is_over: Callable[[Sent], bool]) -> None:
        self.made = 0  # number of the last call
        self.mine = NO_WORKER  # number of this process's agent
        self.never_over = 0  # failed `rpc.remote` calls, which the agent counts as open forever
        self.on_answer: Callable[..., None] = lambda *_: None  # called by `settle` for recorded calls
        self._is_over = is_over
        self._first = 1
        self._numbers = itertools.count(self._first)
        self._under_way: dict[int, Sent] = {}
        self._answered: deque[_Answered] = deque()
        self._of_futures: dict[int, tuple[Sent, weakref.ref[Any]]] = {}  # id of a future -> call
        self._waits = itertools.count(-1, -1)  # negative numbers, for waits that are not calls

    def number_from(self, first: int) -> None:
        """Start call numbers at `first`, so that they are unique in the session."""
        self._first, self._numbers = first, itertools.count(first)

    def new(self, function: str, cell: int = 0, *, is_call: bool = True) -> Sent:
        """Create a call that is about to be sent."""
        call = Sent()
        call.number = number = next(self._numbers if is_call else self._waits)
        if is_call:
            self.made = number
        call.function, call.cell, call.thread = function, cell, threading.get_ident()
        call.worker, call.callee = NO_WORKER, NO_RANK
        call.is_recorded, call.reference_future = False, None
        return call

    def begin(self, call: Sent) -> None:
        """Add a call to the open calls."""
        if self._answered:
            self.settle()
        self._under_way[call.number] = call

    def drop(self, call: Sent) -> None:
        """Remove a call, because it has ended or could not be sent."""
        self._under_way.pop(call.number, None)

    def follow(self, call: Sent, future: Any) -> None:
        """Track the future of a sent call.

        One callback made of builtins notes the time of the answer. A Python function would cost 4 to 24 us, because a
        C++ thread would create and free a Python thread state. `settle` does the remaining work.
        """
        key = id(future)
        self._of_futures[key] = call, weakref.ref(future, partial(self._of_futures.pop, key))
        came: SimpleQueue[Any] = SimpleQueue()
        call.came = [came]
        looked_at = future if call.is_recorded else None
        noted = zip((call,), _times, (looked_at,), map(came.put, (None,)), strict=False)
        future.add_done_callback(partial(next, map(self._answered.append, noted)))

    def of(self, future: Any) -> Sent | None:
        """Return the call that this future belongs to; None if there is none."""
        found = self._of_futures.get(id(future))
        return None if found is None else found[0]

    def came_of(self, future: Any) -> SimpleQueue[Any] | None:
        """Return the queue that gets an item when this future is set; None for all but the first caller."""
        if (call := self.of(future)) is None:
            return None
        try:
            return call.came.pop()  # only one of two concurrent threads gets it
        except IndexError:
            return None

    def settle(self, future: Any = None, value: Any = None, error: Exception | None = None) -> None:
        """Remove answered calls from the open calls. Called by the waiting caller, the next call, or `under_way`.

        Args:
            future: future whose wait has just ended.
            value: its value.
            error: or its exception.
        """
        answered = self._answered
        while answered:
            try:
                call, time_ns, its, _ = answered.popleft()
            except IndexError:  # another thread was faster
                return
            if self._under_way.pop(call.number, None) is not None and self._is_never_over(call):
                self.never_over += 1
            if its is not None:
                if its is future:
                    self.on_answer(call, time_ns, value, error)
                else:
                    self.on_answer(call, time_ns, None, None, its)

    @contextmanager
    def during(self, function: str, to: str, callee: int = NO_RANK, *, is_call: bool = True) -> Iterator[None]:
        """Context for a call, or for a wait for workers without a call."""
        call = self.new(function, is_call=is_call)
        call.to, call.callee, call.sent_ns = to, callee, time.monotonic_ns()
        self.begin(call)
        try:
            yield
        finally:
            self.drop(call)

    def under_way(self) -> list[Sent]:
        """Return the open calls."""
        self.settle()
        return list(self._under_way.values())

    def _is_never_over(self, call: Sent) -> bool:
        """Return whether the agent counts an answered call as open forever.

        This is the case for a failed `rpc.remote`, except for a timeout of a call to another worker. The first callback
        of torch then raises before the agent counts the call as finished. Callbacks added before the failure do not
        run, so such calls also stay in `under_way`.
        """
        future = call.reference_future
        if future is None:
            return False
        try:
            future.value()
        except Exception as error:
            return call.worker == self.mine or not words(error).startswith(_TIMEOUTS)
        return False

    def not_awaited(self, numbers: Container[int], stopped: Container[int]) -> int:
        """Return the number of calls without an answer that `shutdown` does not wait for.

        Args:
            numbers: agent numbers of the current workers; calls to other workers have ended or belong to an earlier
                `init_rpc`.
            stopped: stopped cells.
        """
        sent = [call for call in self.under_way() if call.worker != NO_WORKER]
        return self.never_over + sum(call.worker not in numbers or call.cell in stopped for call in sent)

    def oldest(self, thread: int) -> dict[str, Any] | None:
        """Return the call that this thread has waited for longest, as JSON; None if there is none."""
        call = next((one for one in self.under_way() if one.thread == thread and not self._is_over(one)), None)
        if call is None or (waited_s := (time.monotonic_ns() - call.sent_ns) / 1e9) < _SHORTEST_S:
            return None
        number = max(0, call.number + 1 - self._first)
        return {
            "function": call.function,
            "to": call.to,
            "callee": call.callee,
            "number": number,
            "since_s": waited_s,
        }

    def open(self) -> list[str]:
        """Describe the calls to living workers: `["the call of train on worker1 (rank 1)"]`."""
        return [f"the call of {call.function} on {call.to}" for call in self.under_way() if not self._is_over(call)]

    def words(self, thread: int) -> str:
        """Describe that call: `"waits for train on worker1 (rank 1), call 7, 12 s"`; "" if there is none."""
        if (told := self.oldest(thread)) is None:
            return ""
        number = f", call {told['number']}" * bool(told["number"])
        return f"waits for {told['function']} on {told['to']}{number}, {told['since_s']:.0f} s"

    def awaited(self, thread: int) -> str:
        """Return the worker whose answer this thread waits for: `"worker1 (rank 1)"`; "" if there is none."""
        return next((call.to for call in self.under_way() if call.thread == thread), "")


def name_of(function: Any, args: Any) -> tuple[str, bool]:
    """Return the user's name of a called function, and whether the call is an internal one of torch.

    Resolves calls through proxies of references and through helper functions.
    """
    name = str(getattr(function, "__qualname__", type(function).__name__))
    if name.startswith("_local_invoke") and len(args) > 1:
        return str(args[1]), False
    if name in _HELPERS and args and callable(args[0]):
        return str(getattr(args[0], "__qualname__", name)), False
    return name, getattr(function, "__module__", "") in _NOT_OF_PROGRAMS
