"""Limits of open files per process: compute the need of a session, check it before the start, and raise the limit.

Connections are files. Measured with 4 and 12 ranks:

| process | descriptors |
|---|---|
| notebook | 21, and 3 for each rank (messages, bulk data, the log) |
| host server | 9, and 3 for each of its ranks (the pipes) |
| rank | 46, and 1 for each other rank in each group |
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource

from ddp_notebook.errors import StartError, UsageError

OF_START = 88  # measured: at most 70 for 2 ranks; ZeroMQ aborts the process if it gets no descriptor for a socket
OF_RANK = 4  # for messages, bulk data and the log of a new rank
OF_CLIENT = 32  # measured: 22
_OF_OTHERS = 256  # for Jupyter, libraries and the user
_PER_RANK = 4  # enough for a rank in four groups of all ranks


def needed(world_size: int) -> int:
    """Return the number of open files that any process of a session needs."""
    return _OF_OTHERS + _PER_RANK * world_size


def most() -> int:
    """Return the highest limit that this process may set."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (1 << 31) - 1 if hard == resource.RLIM_INFINITY else hard


def allow(number: int) -> None:
    """Raise the limit of this process and its future children to this number, or to the highest possible."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < number:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(number, most()), hard))


def check(world_size: int, limit: int, where: str) -> None:
    """Raise an error if a session needs more than the limit.

    Args:
        world_size: number of ranks.
        limit: the highest limit that a process may set.
        where: name of the host.

    Raises:
        UsageError: the limit is too low.

    Example:
        >>> check(1024, 1024, "this machine")
        Traceback (most recent call last):
        ddp_notebook.errors.UsageError: 1024 ranks need 4352 open files per process, but the limit on this machine ...
    """
    if needed(world_size) > limit:
        number = needed(world_size)
        raise UsageError(
            f"{world_size} ranks need {number} open files per process, but the limit on {where} is {limit}: start at "
            f"most {max(0, limit - _OF_OTHERS) // _PER_RANK}, or raise the hard limit as root (ulimit -n {number} in "
            "Jupyter's shell, or nofile in /etc/security/limits.conf)"
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
        with contextlib.suppress(OSError):  # no descriptor is left now: the end of the next block tries again
            while len(self._held) < self._count:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


def check_free(count: int, what: str) -> None:
    """Check that this process can open this number of files now, by opening them.

    Args:
        count: number of files.
        what: name of the operation for the error, such as "a start".

    Raises:
        StartError: it cannot.
    """
    opened: list[int] = []
    try:
        while len(opened) < count:
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise StartError(f"process {os.getpid()} cannot open files, but {what} needs {count}: {error}") from error
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise StartError(
            f"process {os.getpid()} has too few file descriptors left: {limit - len(opened)} of {limit} are in use, "
            f"and {what} needs {count}: close files in it, or raise the limit in the shell that starts Jupyter"
        ) from error
    finally:
        for file in opened:
            with contextlib.suppress(OSError):
                os.close(file)
