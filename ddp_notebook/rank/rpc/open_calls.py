"""The calls that this rank has made and that have not returned: what it waits for, in words."""

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

INVOKES = tuple(  # torch's functions that send a call
    f"_invoke_{way}_{what}" for way in ("rpc", "remote") for what in ("builtin", "python_udf", "torchscript")
)
_SHORTEST_S = 0.5  # a wait that is worth a word
# modules of functions that torch and this package call, and programs do not
_NOT_OF_PROGRAMS = "torch.distributed.rpc.api", "ddp_notebook.rank.rpc.values"
_HELPERS = {"_call_method", "call_method", "_remote_method", "_async_on_rref"}  # of torch's tutorials
_TIMEOUTS = "RPCErr:1:", "RPCErr:2:"  # prefixes of errors: a timeout, and a timeout that a test requested
_times: Iterator[int] = iter(time.monotonic_ns, -1)
_Answered = tuple[Sent, int, Any, None]  # since when, and by what future where that is looked at


class RpcCalls:
    """All of them. From any thread.

    Args:
        is_over: tells whether nobody waits for a call any more.
    """

    def __init__(self, is_over: Callable[[Sent], bool]) -> None:
        self.made = 0  # so far
        self.mine = NO_WORKER  # number of this process's agent
        self.never_over = 0  # failed `rpc.remote` calls, which the agent counts as under way for ever
        self.on_answer: Callable[..., None] = lambda *_: None  # `settle` calls it for calls that are recorded
        self._is_over = is_over
        self._first = 1
        self._numbers = itertools.count(self._first)
        self._under_way: dict[int, Sent] = {}
        self._answered: deque[_Answered] = deque()
        self._of_futures: dict[int, tuple[Sent, weakref.ref[Any]]] = {}  # by the ids of these
        self._waits = itertools.count(-1, -1)  # the same as numbers, of what is no call

    def number_from(self, first: int) -> None:
        """Calls have numbers from this on, which no other process of the session gives."""
        self._first, self._numbers = first, itertools.count(first)

    def new(self, function: str, cell: int = 0, *, is_call: bool = True) -> Sent:
        """A call that is about to be made."""
        call = Sent()
        call.number = number = next(self._numbers if is_call else self._waits)
        if is_call:
            self.made = number
        call.function, call.cell, call.thread = function, cell, threading.get_ident()
        call.worker, call.callee = NO_WORKER, NO_RANK
        call.is_recorded, call.reference_future = False, None
        return call

    def begin(self, call: Sent) -> None:
        """It is made."""
        if self._answered:
            self.settle()
        self._under_way[call.number] = call

    def drop(self, call: Sent) -> None:
        """It is over, or could not be made."""
        self._under_way.pop(call.number, None)

    def follow(self, call: Sent, future: Any) -> None:
        """It is on its way, and the future is set when its answer has come. One callback notes all that then is to be
        noted, in builtins: for its first function of Python's a thread that is not Python's gets a stack, and frees it
        again (4 to 24 us). `settle` does the rest."""
        key = id(future)
        self._of_futures[key] = call, weakref.ref(future, partial(self._of_futures.pop, key))
        came: SimpleQueue[Any] = SimpleQueue()
        call.came = [came]
        looked_at = future if call.is_recorded else None
        noted = zip((call,), _times, (looked_at,), map(came.put, (None,)), strict=False)
        future.add_done_callback(partial(next, map(self._answered.append, noted)))

    def of(self, future: Any) -> Sent | None:
        """The call that this future answers; None: it is another one."""
        found = self._of_futures.get(id(future))
        return None if found is None else found[0]

    def came_of(self, future: Any) -> SimpleQueue[Any] | None:
        """What gets something when this future is set, for the first who asks."""
        if (call := self.of(future)) is None:
            return None
        try:
            return call.came.pop()  # of two threads that ask at once one gets it
        except IndexError:
            return None

    def settle(self, future: Any = None, value: Any = None, error: Exception | None = None) -> None:
        """Take leave of the calls whose answers have come: their waiting caller does, or the next call, or who
        asks what is under way.

        Args:
            future: somebody has waited for this one.
            value: what he got by it.
            error: or what it has raised.
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
        """The block is a call, or waits for workers without one."""
        call = self.new(function, is_call=is_call)
        call.to, call.callee, call.sent_ns = to, callee, time.monotonic_ns()
        self.begin(call)
        try:
            yield
        finally:
            self.drop(call)

    def under_way(self) -> list[Sent]:
        """Those that have not returned."""
        self.settle()
        return list(self._under_way.values())

    def _is_never_over(self, call: Sent) -> bool:
        """Return True for an answered `rpc.remote` that has failed.

        The first callback of torch raises then, before the agent counts the call as over; but not at a timeout of a
        call to another worker. Callbacks that are added before the failure do not run: such calls stay under way."""
        future = call.reference_future
        if future is None:
            return False
        try:
            future.value()
        except Exception as error:
            return call.worker == self.mine or not words(error).startswith(_TIMEOUTS)
        return False

    def not_awaited(self, numbers: Container[int], stopped: Container[int]) -> int:
        """Count the calls without an answer that `shutdown` does not wait for.

        Args:
            numbers: of the current workers; others have ended, or are of an earlier `init_rpc`.
            stopped: cells that were.
        """
        sent = [call for call in self.under_way() if call.worker != NO_WORKER]
        return self.never_over + sum(call.worker not in numbers or call.cell in stopped for call in sent)

    def oldest(self, thread: int) -> dict[str, Any] | None:
        """What this thread has waited for longest, as JSON; None: nothing."""
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

    def words(self, thread: int) -> str:
        """The same: `"waits for train on worker1 (rank 1), call 7, 12 s"`; "" if for nothing."""
        if (told := self.oldest(thread)) is None:
            return ""
        number = f", call {told['number']}" * bool(told["number"])
        return f"waits for {told['function']} on {told['to']}{number}, {told['since_s']:.0f} s"

    def awaited(self, thread: int) -> str:
        """Whose answer this thread waits for: `"worker1 (rank 1)"`; "" if for nobody's."""
        return next((call.to for call in self.under_way() if call.thread == thread), "")


def name_of(function: Any, args: Any) -> tuple[str, bool]:
    """What a cell calls a function, also through a reference's proxy or a helper of its own; whether it is one that
    torch calls for itself."""
    name = str(getattr(function, "__qualname__", type(function).__name__))
    if name.startswith("_local_invoke") and len(args) > 1:
        return str(args[1]), False
    if name in _HELPERS and args and callable(args[0]):
        return str(getattr(args[0], "__qualname__", name)), False
    return name, getattr(function, "__module__", "") in _NOT_OF_PROGRAMS
