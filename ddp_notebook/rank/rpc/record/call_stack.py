"""Current remote call and autograd context of each thread, for the recording."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import get_ident as _thread

from ddp_notebook.rank.remote_calls import Ran

_BITS = 38  # bits of a worker's counter; with 15 bits of the worker number, the sum is exact as a float in the monitor


class RpcThread:
    """Current remote call and autograd context of each thread.

    Python sees each agent thread as a new thread at every call. So `threading.local` would be created and discarded at
    each call (5 us).

    Args:
        running: thread -> innermost call that it executes.
    """

    def __init__(self, running: Mapping[int, Ran]) -> None:
        self._running = running
        self._fetching: dict[int, int] = {}  # thread -> its own call within which torch makes others
        self._contexts: dict[int, int] = {}  # thread -> context that the thread has opened

    @property
    def inside(self) -> int:
        """Return the number of the call that this thread executes; 0 for none."""
        return self.of(_thread())[0]

    @property
    def context(self) -> int:
        """Return the autograd context of the thread's calls; 0 for none."""
        return self.of(_thread())[1]

    @context.setter
    def context(self, context: int) -> None:
        if context:
            self._contexts[_thread()] = context
        else:
            self._contexts.pop(_thread(), None)

    def of(self, thread: int) -> tuple[int, int]:
        """Return call and context of a thread."""
        ran = self._running.get(thread)
        inside, context = (0, 0) if ran is None else (ran.number, ran.context)
        if self._fetching:
            inside = self._fetching.get(thread, inside)
        if self._contexts:
            context = self._contexts.get(thread, context)
        return inside, context

    @contextmanager
    def fetching(self, number: int) -> Iterator[None]:
        """Context in which this thread makes its own call."""
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
    """Return a number that is unique among all workers.

    Args:
        worker: agent number of the worker.
        count: counter of the worker, from 0.

    Example:
        >>> numbered(0, 0), numbered(1, 4) - numbered(1, 0)
        (1, 4)
    """
    return (worker << _BITS | count) + 1
