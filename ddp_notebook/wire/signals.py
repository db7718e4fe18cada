"""Our own signals between the host server and the ranks: real-time signals, which nobody else sends.

SIGINT and SIGTERM are not among them: VS Code's stop button sends SIGINT to every process below the kernel and then to
the kernel, and SIGTERM to all of them when it closes. Whoever gets one of the two has been told nothing by the session,
and goes on (`ignore_strangers`; for ranks `rank.cell.handlers`).

On systems without real-time signals (macOS) SIGINT and SIGTERM are what the session sends, and messages on the wire do
later what `RELEASE` does.
"""

from __future__ import annotations

from collections.abc import Iterator
from errno import EAGAIN

from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import contextlib, ctypes, os, re, signal

_FIRST: int | None = getattr(signal, "SIGRTMIN", None)
# Free the rank from the operation that it waits in, if it runs the cell whose number comes with the signal.
# See `rank.group.release`.
RELEASE = None if _FIRST is None else _FIRST + 5
STACK = None if _FIRST is None else _FIRST + 6  # write where every thread is, even while one holds the GIL
INTERRUPT: int = signal.SIGINT if _FIRST is None else _FIRST + 7  # do what SIGINT does in a notebook of its own
# The same once more, from the rank's own threads: it ends nothing but a wait where the main thread has noticed already.
AGAIN: int = signal.SIGURG if _FIRST is None else _FIRST + 9
END: int = signal.SIGTERM if _FIRST is None else _FIRST + 8  # end, in order: a rank
FAULT: int = signal.SIGUSR2 if _FIRST is None else _FIRST + 10  # fail here: from the rank's own thread, `rank.faults`


# Real-time signals, whose default action ends a process.
OURS: tuple[int, ...] = () if _FIRST is None else tuple(range(_FIRST + 5, _FIRST + 11))
STRANGERS = (signal.SIGINT, signal.SIGTERM)


def ignore_strangers() -> None:
    """Go on at SIGINT and SIGTERM, and let what this process starts go on too."""
    for number in STRANGERS:
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Hold SIGINT and SIGTERM back in this thread, and in a process that it starts meanwhile until that ignores them.
    This thread gets afterwards what has come."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STRANGERS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def block_release() -> None:
    """Block `RELEASE` in this thread and those that it starts: one thread waits for it. The first step of a rank."""
    if RELEASE is not None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {RELEASE})


_SI_VALUE = 24  # offset of the number in a `siginfo_t`, on 64-bit Linux
_SIGNAL_BYTES = 128  # of a `siginfo_t`, and of a `sigset_t`


def send(pid: int, number: int, value: int) -> None:
    """Send a signal, and with `RELEASE` a number.

    A process can have a limited number of waiting signals (RLIMIT_SIGPENDING). At this limit `RELEASE` is not sent, and
    the message on the wire has the same effect a little later.

    One of ours is not sent to a process that has no handler for it: its default action would end the process, with all
    variables. A rank hears of a stop on the wire too, and puts its handlers back then.

    Raises:
        ProcessLookupError: there is no such process.
    """
    if number in OURS and not _is_handled(pid, number):
        return
    if number != RELEASE:
        os.kill(pid, number)
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.sigqueue(ctypes.c_int(pid), ctypes.c_int(number), ctypes.c_void_p(value)) != 0:
        error = ctypes.get_errno()
        if error != EAGAIN:  # EAGAIN: the process has reached the limit of waiting signals
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
    """Wait for `RELEASE`, which this thread blocks. Returns the number that came with it.

    Python's `sigwaitinfo` does not return the number, and without it a signal that is noticed late would be taken for
    the next cell's.
    """
    assert RELEASE is not None
    libc = ctypes.CDLL(None)
    buffer = ctypes.c_char * _SIGNAL_BYTES  # `create_string_buffer` needs `isinstance` and `int` of `builtins`
    wanted, info = buffer(), buffer()
    libc.sigemptyset(wanted)
    libc.sigaddset(wanted, RELEASE)
    while libc.sigwaitinfo(wanted, info) != RELEASE:
        pass  # another signal has interrupted the wait
    return ctypes.c_int.from_buffer(info, _SI_VALUE).value
