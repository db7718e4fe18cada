"""gloo's event loops look more rarely: a rank that does nothing does little else than that.

Each group has a thread that waits for its connections 10 ms at a time, since whoever closes one waits for the thread's
next turn. That is 100 turns a second, 0.2 % of a core. Linux lets a thread say by how much its timers may be late, and
a new thread takes that over from the one that makes it. What comes over a connection ends the wait at once, as ever;
only to free a group takes longer, up to 30 ms a connection, and nobody waits for that (`keeping`, `renewal`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from ddp_notebook.stdlib import contextlib, ctypes

_SET, _GET = 29, 30  # PR_SET_TIMERSLACK, PR_GET_TIMERSLACK. Source: prctl(2)
_LATE_NS = 20_000_000
_libc = ctypes.CDLL(None)


@contextlib.contextmanager
def rare() -> Iterator[None]:
    """Threads that are made meanwhile by this one have lazy timers."""
    if sys.platform != "linux":
        yield
        return
    before = _libc.prctl(_GET, 0, 0, 0, 0)
    _libc.prctl(_SET, ctypes.c_ulong(_LATE_NS), 0, 0, 0)
    try:
        yield
    finally:
        if before > 0:  # gVisor has none
            _libc.prctl(_SET, ctypes.c_ulong(before), 0, 0, 0)
