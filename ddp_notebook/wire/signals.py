"""Our own signals between the host server and the ranks: real-time signals, which no library uses.

On systems without them (macOS) messages on the wire do the same, later.
"""

from __future__ import annotations

import ctypes
import os
import signal

_FIRST: int | None = getattr(signal, "SIGRTMIN", None)
# Free the rank from the operation that it waits in, if it runs the cell whose number comes with the signal.
# See `rank.group.release`.
RELEASE = None if _FIRST is None else _FIRST + 5
STACK = None if _FIRST is None else _FIRST + 6  # write where every thread is, even while one holds the GIL


def block_release() -> None:
    """Block `RELEASE` in this thread and those that it starts: one thread waits for it. The first step of a rank."""
    if RELEASE is not None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {RELEASE})


_SI_VALUE = 24  # offset of the number in a `siginfo_t`, on 64-bit Linux
_SIGNAL_BYTES = 128  # of a `siginfo_t`, and of a `sigset_t`


def send(pid: int, number: int, value: int) -> None:
    """Send a signal; `RELEASE` takes a number with it.

    Raises:
        ProcessLookupError: there is no such process.
    """
    if number != RELEASE:
        os.kill(pid, number)
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.sigqueue(ctypes.c_int(pid), ctypes.c_int(number), ctypes.c_void_p(value)) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def wait_for_release() -> int:
    """Wait for `RELEASE`, which this thread blocks. Returns the number that came with it.

    Python's `sigwaitinfo` does not return the number, and without it a signal that is noticed late would be taken for
    the next cell's.
    """
    assert RELEASE is not None
    libc = ctypes.CDLL(None)
    wanted, info = ctypes.create_string_buffer(_SIGNAL_BYTES), ctypes.create_string_buffer(_SIGNAL_BYTES)
    libc.sigemptyset(wanted)
    libc.sigaddset(wanted, RELEASE)
    while libc.sigwaitinfo(wanted, info) != RELEASE:
        pass  # another signal has interrupted the wait
    return ctypes.c_int.from_buffer(info, _SI_VALUE).value
