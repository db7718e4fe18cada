"""Where a thread is in remote calls, for the recording."""

from __future__ import annotations

from threading import get_ident as _thread
from typing import Any

_BITS = 38  # of what a worker counts; with 15 of its own number they are exact in a float of the monitor's


class Here:
    """Each thread. (A thread of the agent's is a new one to Python at every call, so `threading.local` is made and
    thrown away each time: 5 us.)"""

    def __init__(self) -> None:
        self._inside: dict[int, int] = {}  # by thread
        self._contexts: dict[int, int] = {}
        self._making: dict[int, tuple[int, Any, Any]] = {}

    @property
    def inside(self) -> int:
        """The call that this thread executes; 0: none."""
        return self._inside.get(_thread(), 0)

    @property
    def context(self) -> int:
        """Of distributed autograd, that the thread's calls belong to; 0: none."""
        return self._contexts.get(_thread(), 0)

    @context.setter
    def context(self, context: int) -> None:
        self.enter(self.inside, context)

    def enter(self, inside: int, context: int) -> None:
        """From now on the thread executes this call, in this context."""
        thread = _thread()
        for known, value in ((self._inside, inside), (self._contexts, context)):
            if value:
                known[thread] = value
            else:
                known.pop(thread, None)

    @property
    def making(self) -> int:
        """The call that the thread is about to make; 0: none."""
        return self._making[_thread()][0] if self._making and _thread() in self._making else 0

    def make(self, number: int, function: Any, args: Any) -> None:
        """The thread is about to make this call."""
        self._making[_thread()] = number, function, args

    def made(self) -> tuple[int, Any, Any] | None:
        """The call that it was about to make, with its function and arguments; None: it is not recorded."""
        return self._making.pop(_thread(), None)


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
