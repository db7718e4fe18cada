"""Where a thread is in remote calls, for the recording."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import get_ident as _thread

from ddp_notebook.rank.remote_calls import Ran

_BITS = 38  # of what a worker counts; with 15 of its own number they are exact in a float of the monitor's


class RpcThread:
    """Each thread. (A thread of the agent's is a new one to Python at every call, so `threading.local` is made and
    thrown away each time: 5 us.)

    Args:
        running: the innermost calls that threads execute.
    """

    def __init__(self, running: Mapping[int, Ran]) -> None:
        self._running = running
        self._fetching: dict[int, int] = {}  # by thread: a call of its own, in which torch makes others
        self._contexts: dict[int, int] = {}  # that a thread has opened itself

    @property
    def inside(self) -> int:
        """The call that this thread executes; 0: none."""
        return self.of(_thread())[0]

    @property
    def context(self) -> int:
        """Of distributed autograd, that the thread's calls belong to; 0: none."""
        return self.of(_thread())[1]

    @context.setter
    def context(self, context: int) -> None:
        if context:
            self._contexts[_thread()] = context
        else:
            self._contexts.pop(_thread(), None)

    def of(self, thread: int) -> tuple[int, int]:
        """Both, of a thread."""
        ran = self._running.get(thread)
        inside, context = (0, 0) if ran is None else (ran.number, ran.context)
        if self._fetching:
            inside = self._fetching.get(thread, inside)
        if self._contexts:
            context = self._contexts.get(thread, context)
        return inside, context

    @contextmanager
    def fetching(self, number: int) -> Iterator[None]:
        """In the block this thread is in a call of its own."""
        thread = _thread()
        before = self._fetching.get(thread)
        self._fetching[thread] = number
        try:
            yield
        finally:
            if before is None:
                self._fetching.pop(thread, None)
            else:
                self._fetching[thread] = before


def numbered(worker: int, count: int) -> int:
    """A number that no other worker gives.

    Args:
        worker: number of its agent.
        count: its own, from 0.

    Example:
        >>> numbered(0, 0), numbered(1, 4) - numbered(1, 0)
        (1, 4)
    """
    return (worker << _BITS | count) + 1
