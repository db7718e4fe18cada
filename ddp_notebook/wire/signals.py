"""Private signals between the host server and the ranks: real-time signals that no other program sends.

SIGINT and SIGTERM are not used, because VS Code sends them to all processes below the kernel: SIGINT at its stop
button, SIGTERM when it closes. The host server and the ranks ignore them (`ignore_strangers`; for ranks see
`rank.cell.signal_handlers`).

macOS has no real-time signals. There the session sends SIGINT and SIGTERM, and messages over ZeroMQ replace `RELEASE`,
with a longer delay.
"""

from __future__ import annotations

from collections.abc import Iterator
from errno import EAGAIN

from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import contextlib, ctypes, os, re, signal

_FIRST: int | None = getattr(signal, "SIGRTMIN", None)
# Release the rank from a blocking operation, if it runs the cell whose number is the signal's value. See
# `rank.group.release`.
RELEASE = None if _FIRST is None else _FIRST + 5
STACK = None if _FIRST is None else _FIRST + 6  # write the stack of every thread, even while one thread holds the GIL
INTERRUPT: int = signal.SIGINT if _FIRST is None else _FIRST + 7  # interrupt the cell, like SIGINT in a plain notebook
# Repeated interrupt, sent by the rank's own threads: it only ends a blocking wait if the main thread already handled
# the first one.
AGAIN: int = signal.SIGURG if _FIRST is None else _FIRST + 9
END: int = signal.SIGTERM if _FIRST is None else _FIRST + 8  # exit in an orderly manner (ranks only)
FAULT: int = signal.SIGUSR2 if _FIRST is None else _FIRST + 10  # raise an injected fault (sent by the rank itself)


# All private signals. Their default action kills a process.
OURS: tuple[int, ...] = () if _FIRST is None else tuple(range(_FIRST + 5, _FIRST + 11))
STRANGERS = (signal.SIGINT, signal.SIGTERM)


def ignore_strangers() -> None:
    """Ignore SIGINT and SIGTERM in this process and in its child processes."""
    for number in STRANGERS:
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Block SIGINT and SIGTERM in this thread. Blocked signals are delivered at the end of the context.

    A child process started in this context inherits the block until it ignores these signals.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STRANGERS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def block_release() -> None:
    """Block `RELEASE` in this thread and its child threads, because one thread waits for it.

    A rank calls this first.
    """
    if RELEASE is not None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {RELEASE})


_SI_VALUE = 24  # offset of the value in a `siginfo_t`, on 64-bit Linux
_SIGNAL_BYTES = 128  # size of a `siginfo_t`, and of a `sigset_t`


def send(pid: int, number: int, value: int) -> None:
    """Send a signal; `RELEASE` carries a value.

    The number of pending signals of a process is limited (RLIMIT_SIGPENDING). At this limit `RELEASE` is not sent. The
    message over ZeroMQ then has the same effect a little later.

    A private signal is sent only if the process handles it. Otherwise its default action would kill the process, with
    all its variables. The rank receives the stop over ZeroMQ too, and then restores its handlers.

    Args:
        pid: process id.
        number: signal number.
        value: value of `RELEASE`, the number of a cell.

    Raises:
        ProcessLookupError: the process does not exist.
    """
    if number in OURS and not _is_handled(pid, number):
        return
    if number != RELEASE:
        os.kill(pid, number)
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.sigqueue(ctypes.c_int(pid), ctypes.c_int(number), ctypes.c_void_p(value)) != 0:
        error = ctypes.get_errno()
        if error != EAGAIN:  # EAGAIN: limit of pending signals reached
            raise OSError(error, os.strerror(error))


def _is_handled(pid: int, number: int) -> bool:
    """Return whether a process handles or ignores a signal; True if the system cannot report it."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            status = file.read()
    except OSError:
        return True
    masks = re.findall(rb"^Sig(?:Cgt|Ign):\s*([0-9a-f]+)", status, re.MULTILINE)
    return not masks or any(int(mask, 16) >> number - 1 & 1 for mask in masks)


def wait_for_release() -> int:
    """Wait for `RELEASE`, which this thread must have blocked. Return the value of the signal.

    Python's `sigwaitinfo` does not return the value. Without it, a delayed signal would apply to the next cell.
    """
    assert RELEASE is not None
    libc = ctypes.CDLL(None)
    buffer = ctypes.c_char * _SIGNAL_BYTES  # `create_string_buffer` needs `isinstance` and `int` of `builtins`
    wanted, info = buffer(), buffer()
    libc.sigemptyset(wanted)
    libc.sigaddset(wanted, RELEASE)
    while libc.sigwaitinfo(wanted, info) != RELEASE:
        pass  # interrupted by another signal
    return ctypes.c_int.from_buffer(info, _SI_VALUE).value
