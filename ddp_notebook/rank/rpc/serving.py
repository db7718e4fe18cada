"""What a callee runs, so that it ends with the cell of its caller.

A stop reaches the main thread of each rank whose cell runs. What a thread of an agent runs meanwhile for another rank
would go on, and hold its thread: with all of them held the rank answers nobody. So each call carries the cell that it
was made for, and the notebook's message that stops a cell, which all ranks get, stops what they execute for it: code in
Python at its next line, waits for calls at once, and what has not begun never begins. (Over RPC it could not come: with
all threads held an agent does not even take answers.) What is in C, such as `time.sleep`, ends when that returns, and
whoever was stopped hears of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
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
    """Records calls as rows, see `rpc.record.recorder`. Set while the rank records."""

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
    """A call as it travels, in place of torch's `PythonUDF`."""

    __slots__ = "args", "cell", "context", "func", "kwargs", "number"

    def __init__(self, func: Any, args: Any, kwargs: Any, cell: int = 0, number: int = 0, context: int = 0) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.cell = cell  # that it was made for; 0: none
        self.number = number  # that the recording gives it; 0: it is not recorded
        self.context = context  # of distributed autograd

    def __reduce__(self) -> Any:
        return Travelling, (self.func, self.args, self.kwargs, self.cell, self.number, self.context)


class Serving:
    """All of them. From any thread.

    Args:
        calls: that this rank makes.
        running_cell: tells its own cell; 0: none runs.
    """

    def __init__(self, calls: RpcCalls, running_cell: Callable[[], int]) -> None:
        self.calls, self._running_cell = calls, running_cell
        self.recorder: CallRecorder | None = None
        self.stopped: set[int] = set()  # cells
        self.threads = 0  # that the agent has; 0: there is none
        self._lock = threading.Lock()
        self.running: dict[int, Ran] = {}  # by thread: the innermost one

    # ---- the thread that executes it

    def begin(self, served: Ran) -> None:
        """This thread begins with one. From here on it may be stopped, once.

        Raises:
            KeyboardInterrupt: its cell is stopped, or was.
        """
        with self._lock:
            if served.cell in self.stopped:
                raise KeyboardInterrupt
            served.outer = self.running.get(served.thread)
            waiting.begin(served.thread)
            self.running[served.thread] = served

    def end(self, served: Ran) -> None:
        """It is through with it, if it has begun. May be told again, where a stop came meanwhile."""
        with self._lock:
            if self.running.get(served.thread) is not served:
                return
            if served.outer is None:
                waiting.end(served.thread)
                del self.running[served.thread]
            else:
                self.running[served.thread] = served.outer
            if served.is_stopped:
                _raise_in(ctypes.c_ulong(served.thread), None)  # if it was not raised yet

    def cell(self) -> int:
        """The cell that this thread makes calls for."""
        served = self.running.get(threading.get_ident())
        return self._running_cell() if served is None else served.cell

    # ---- any thread

    def stop(self, cell: int) -> None:
        """Stop the calls of a cell. Waits for nothing."""
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
        """Whether it was stopped, and this rank is no longer in it."""
        return cell in self.stopped and cell != self._running_cell()

    def going_on(self) -> list[tuple[str, int]]:
        """The functions of stopped calls that have not ended, and their cells."""
        return [(served.function, served.cell) for served in self.going() if served.is_stopped]

    def words(self, thread: int, *, is_main: bool) -> str:
        """What a thread waits for, and of the main one also whether all of the agent's do."""
        told = self.calls.words(thread)
        return "; ".join(filter(None, [told, self._exhausted()])) if told and is_main else told

    def to_json(self, main: int, place: Callable[[int], str]) -> dict[str, Any]:
        """What this rank waits for and serves, as JSON; nothing where it does neither.

        Args:
            main: the main thread.
            place: tells where a thread is.
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
        """The innermost calls that its threads execute."""
        return list(self.running.values())

    def _exhausted(self) -> str:
        """Whether no thread is left to serve anybody, since all wait: `"all 16 threads of this rank wait for calls to
        worker1 (rank 1)"`."""
        served = self.going()
        if not self.threads or len(served) < self.threads:
            return ""
        to = [self.calls.awaited(one.thread) for one in served]
        if not all(to):
            return ""
        return f"all {self.threads} threads of this rank wait for calls to {' and '.join(sorted(set(to)))}"


def _backwards() -> list[int]:
    """Threads of an agent that are in Python code of somebody's backward. Distributed autograd begins it in C++, and it
    is no call of a function."""
    found = []
    for thread, innermost in sys._current_frames().items():
        frame = innermost
        while frame.f_back is not None:
            frame = frame.f_back
        if frame.f_code.co_filename == autograd.function.__file__:
            found.append(thread)
    return found
