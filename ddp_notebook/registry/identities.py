"""Processes by id *and* start time, so that a reused id is never mistaken."""

from __future__ import annotations

import sys

import psutil

_LINUX = sys.platform == "linux"
_LETTERS = {psutil.STATUS_ZOMBIE: "Z", psutil.STATUS_STOPPED: "T"}  # elsewhere than on Linux

Identity = tuple[int, float]  # process id, start time on a clock that is never set


def identity(pid: int) -> Identity:
    """The identity of a running process.

    Raises:
        ProcessLookupError: there is none.
    """
    return pid, state_and_start(pid)[1]


def is_running(who: Identity) -> bool:
    """Whether the very process still runs; a zombie does not."""
    pid, started = who
    try:
        state, start = state_and_start(pid)
    except ProcessLookupError:
        return False
    return start == started and state != "Z"


def state_and_start(pid: int) -> tuple[str, float]:
    """State letter and start time. On Linux in clock ticks since boot: psutil's create_time() is in wall time,
    which moves when the clock is set, and a rank must not take its living owner for a stranger then."""
    if _LINUX:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()  # the command before it may hold anything
        except (FileNotFoundError, ProcessLookupError):
            raise ProcessLookupError(f"no process {pid}") from None
        return fields[0].decode(), float(fields[19])
    try:
        process = psutil.Process(pid)
        return _LETTERS.get(process.status(), "R"), process.create_time()
    except psutil.NoSuchProcess:
        raise ProcessLookupError(f"no process {pid}") from None
