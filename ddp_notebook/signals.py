"""The signals between the host server and the ranks that are ours. Real-time signals, which no library uses.

Where the system has none (macOS), the wire says the same, later.
"""

from __future__ import annotations

import signal

_FIRST: int | None = getattr(signal, "SIGRTMIN", None)
RELEASE = None if _FIRST is None else _FIRST + 5  # let go of whatever operation the rank waits in, see `rank.release`
STACK = None if _FIRST is None else _FIRST + 6  # write where every thread is, even while one holds the interpreter


def block_release() -> None:
    """Keep `RELEASE` from this thread and those that it starts: one thread waits for it. First thing in a rank."""
    if RELEASE is not None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {RELEASE})
