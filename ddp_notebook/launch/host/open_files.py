"""How many files a process may have open: what a session needs is known, asked for before it starts, and allowed.

Connections are files. Measured with 4 and 12 ranks: the notebook has 21 and 3 for each rank (messages, bulk data, the
log), a host server 9 and 3 for each of its ranks (the pipes), a rank 46 and one for each other rank in each group.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource

from ddp_notebook.errors import StartError, UsageError

OF_START = 88  # measured: 70 at most for 2 ranks. ZeroMQ ends the process where it finds no descriptor for a socket
OF_RANK = 4  # a new rank needs them for messages, bulk data and the log
OF_CLIENT = 32  # measured: 22
_OF_OTHERS = 256  # what Jupyter, libraries and the user have open
_PER_RANK = 4  # a rank can then be in four groups of all


def needed(world_size: int) -> int:
    """How many any process of a session needs."""
    return _OF_OTHERS + _PER_RANK * world_size


def most() -> int:
    """How many this process may allow itself."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (1 << 31) - 1 if hard == resource.RLIM_INFINITY else hard


def allow(number: int) -> None:
    """Let this process, and those that it starts from now on, have so many open, or as many as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < number:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(number, most()), hard))


def check(world_size: int, limit: int, where: str) -> None:
    """Refuse a session that needs more.

    Args:
        world_size: its ranks.
        limit: how many a process may allow itself.
        where: on which host.

    Raises:
        UsageError: they are too few.

    Example:
        >>> check(1024, 1024, "this machine")
        Traceback (most recent call last):
        ddp_notebook.errors.UsageError: 1024 ranks need 4352 open files in a process, and on this machine the most ...
    """
    if needed(world_size) > limit:
        number = needed(world_size)
        raise UsageError(
            f"{world_size} ranks need {number} open files in a process, and on {where} the most is {limit}: start "
            f"{max(0, limit - _OF_OTHERS) // _PER_RANK} at most, or raise the hard limit, as root, in the shell that "
            f"starts Jupyter (ulimit -n {number}) or for all logins (nofile in /etc/security/limits.conf)"
        )


class Spare:
    """File descriptors that a process holds back, and releases in a `with` block.

    Args:
        count: how many.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._held: list[int] = []
        self._take()

    def __enter__(self) -> None:
        self.close()

    def __exit__(self, *_: object) -> None:
        self._take()

    def close(self) -> None:
        """Release all descriptors."""
        while self._held:
            os.close(self._held.pop())

    def _take(self) -> None:
        with contextlib.suppress(OSError):  # none is left now: the end of the next block tries again
            while len(self._held) < self._count:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


def check_free(count: int, what: str) -> None:
    """Check that this process can open so many files now, by opening them.

    Args:
        what: needs them, as the error names it: "a start".

    Raises:
        StartError: it cannot.
    """
    opened: list[int] = []
    try:
        while len(opened) < count:
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise StartError(f"process {os.getpid()} can open no files, and {what} needs {count}: {error}") from error
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise StartError(
            f"process {os.getpid()} has too few file descriptors left: {limit - len(opened)} of {limit} are in use, "
            f"and {what} needs {count}: close files in it, or raise the limit in the shell that starts Jupyter"
        ) from error
    finally:
        for file in opened:
            with contextlib.suppress(OSError):
                os.close(file)
