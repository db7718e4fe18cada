"""How many files a process may have open: what a session needs is known, asked for before it starts, and allowed.

Connections are files. Measured with 4 and 12 ranks: the notebook has 21 and 3 for each rank (messages, bulk data, the
log), a host server 9 and 3 for each of its ranks (the pipes), a rank 46 and one for each other rank in each group.
"""

from __future__ import annotations

import resource

from ddp_notebook.errors import UsageError

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
