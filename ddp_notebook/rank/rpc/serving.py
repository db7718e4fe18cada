"""Calls that this rank executes for others. They end with the cell of their caller.

A stop interrupts the main thread of each rank that runs the cell. Calls that agent threads execute for other ranks
would continue and occupy their threads. With all threads occupied, the rank answers no calls. So each call carries the
number of the cell that it was made for. All ranks receive the notebook's message that stops a cell, and stop the calls
of that cell:

- Python code stops at its next line.
- Waits for calls end immediately.
- Calls that have not started never start.
- C code, such as `time.sleep`, stops when it returns.

The message is not sent over RPC, because an agent does not even process answers when all its threads are occupied.
"""

from __future__ import annotations

from collections.abc import Callable
from sys import _current_frames
from typing import TYPE_CHECKING, Any, Protocol

from torch import autograd

from ddp_notebook.rank.group import waiting
from ddp_notebook.rank.remote_calls import Ran, Sent
from ddp_notebook.rank.rpc.open_calls import RpcCalls
from ddp_notebook.stdlib import ctypes, threading, time

if TYPE_CHECKING:
    from torch._C._distributed_rpc import PyRRef

    from ddp_notebook.rank.rpc.record.call_stack import RpcThread

_raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc


class CallRecorder(Protocol):
    """Records calls as rows, see `rank.rpc.record.rpc_recorder`. Set while the rank records."""

    here: RpcThread

    @property
    def is_on(self) -> bool: ...

    def sends(self, call: Sent, what: bytes | None, args: Any) -> None: ...
    def before(self, call: Sent) -> set[int]: ...
    def failed(self, call: Sent, error: BaseException) -> None: ...
    def made(self, call: Sent, reference: PyRRef[Any]) -> None: ...
    def sent_in_context(self, call: Sent, before: set[int], future: Any) -> None: ...
    def came(self, context: int) -> None: ...
    def ran(self, ran: Ran, result: Any) -> None: ...


class Travelling:
    """Message of a call, instead of a `PythonUDF` of torch."""

    __slots__ = "args", "cell", "context", "func", "kwargs", "number"

    def __init__(self, func: Any, args: Any, kwargs: Any, cell: int = 0, number: int = 0, context: int = 0) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.cell = cell  # cell for which it was made; 0: none
        self.number = number  # number in the recording; 0: not recorded
        self.context = context  # context of distributed autograd

    def __reduce__(self) -> Any:
        return Travelling, (self.func, self.args, self.kwargs, self.cell, self.number, self.context)


class Serving:
    """Calls that this rank executes. Thread-safe.

    Args:
        calls: open calls of this rank.
        running_cell: returns the running cell of this rank; 0 if none runs.
    """

    def __init__(self, calls: RpcCalls, running_cell: Callable[[], int]) -> None:
        self.calls, self._running_cell = calls, running_cell
        self.recorder: CallRecorder | None = None
        self.stopped: set[int] = set()  # stopped cells
        self.threads = 0  # number of agent threads; 0 without an agent
        self._lock = threading.Lock()
        self.running: dict[int, Ran] = {}  # thread -> innermost call

    # ---- the thread that executes it

    def begin(self, served: Ran) -> None:
        """Start a call in this thread. From now on a stop may interrupt it, once.

        Raises:
            KeyboardInterrupt: the cell of the call was stopped.
        """
        with self._lock:
            if served.cell in self.stopped:
                raise KeyboardInterrupt
            served.outer = self.running.get(served.thread)
            waiting.begin(served.thread)
            self.running[served.thread] = served

    def end(self, served: Ran) -> None:
        """End a call in this thread, if it was started. May be called again after a stop."""
        with self._lock:
            if self.running.get(served.thread) is not served:
                return
            if served.outer is None:
                waiting.end(served.thread)
                del self.running[served.thread]
            else:
                self.running[served.thread] = served.outer
            if served.is_stopped:
                _raise_in(ctypes.c_ulong(served.thread), None)  # cancels the exception if it was not raised yet

    def cell(self) -> int:
        """Return the cell for which this thread makes calls."""
        served = self.running.get(threading.get_ident())
        return self._running_cell() if served is None else served.cell

    # ---- any thread

    def stop(self, cell: int) -> None:
        """Stop the calls of a cell. Does not block."""
        with self._lock:
            self.stopped.add(cell)
            for served in self.running.values():
                if served.cell == cell and not served.is_stopped:
                    served.is_stopped = True
                    _raise_in(ctypes.c_ulong(served.thread), ctypes.py_object(KeyboardInterrupt))
                    waiting.interrupt(served.thread)
        if self.threads and self._running_cell() in (0, cell):
            for thread in _backwards():
                _raise_in(ctypes.c_ulong(thread), ctypes.py_object(KeyboardInterrupt))

    def is_past(self, cell: int) -> bool:
        """Return whether the cell was stopped and this rank no longer runs it."""
        return cell in self.stopped and cell != self._running_cell()

    def going_on(self) -> list[tuple[str, int]]:
        """Return (function, cell) of stopped calls that have not ended."""
        return [(served.function, served.cell) for served in self.going() if served.is_stopped]

    def words(self, thread: int, *, is_main: bool) -> str:
        """Describe the call that a thread waits for. For the main thread, also report if all agent threads wait."""
        told = self.calls.words(thread)
        return "; ".join(filter(None, [told, self._exhausted()])) if told and is_main else told

    def to_json(self, main: int, place: Callable[[int], str]) -> dict[str, Any]:
        """Return the calls that this rank waits for and executes, as JSON; empty if there are none.

        Args:
            main: id of the main thread.
            place: returns the position of a thread.
        """
        call, serves = self.calls.oldest(main), self.going()
        if call is None and not serves:
            return {}
        now_ns = time.monotonic_ns()
        return {
            "call": call,
            "serves": [[one.function, place(one.thread), (now_ns - one.begun_ns) / 1e9] for one in serves],
            "exhausted": self._exhausted(),
            "going_on": self.going_on(),
        }

    def going(self) -> list[Ran]:
        """Return the innermost call of each thread."""
        return list(self.running.values())

    def _exhausted(self) -> str:
        """Describe the state that all agent threads wait for calls; "" if a thread is free.

        Example: `"all 16 threads of this rank wait for calls to worker1 (rank 1)"`.
        """
        served = self.going()
        if not self.threads or len(served) < self.threads:
            return ""
        to = [self.calls.awaited(one.thread) for one in served]
        if not all(to):
            return ""
        return f"all {self.threads} threads of this rank wait for calls to {' and '.join(sorted(set(to)))}"


def _backwards() -> list[int]:
    """Return agent threads that run Python code of a backward pass.

    Distributed autograd starts these passes in C++, not as calls of functions.
    """
    found = []
    for thread, innermost in _current_frames().items():
        frame = innermost
        while frame.f_back is not None:
            frame = frame.f_back
        if frame.f_code.co_filename == autograd.function.__file__:
            found.append(thread)
    return found
