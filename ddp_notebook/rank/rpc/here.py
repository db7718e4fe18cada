"""Where a thread is in remote calls, for the recording."""

from __future__ import annotations

import threading
from typing import Any

_BITS = 38  # of what a worker counts; with 15 of its own number they are exact in a float of the monitor's


class Here(threading.local):
    """One thread."""

    inside = 0  # the call that it executes; 0: none
    making = 0  # the call that it is about to make
    function: Any = None  # that this call is for
    args: Any = None
    context = 0  # of distributed autograd, that its calls belong to


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
