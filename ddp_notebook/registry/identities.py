"""Process identities: id *and* start time, so that a reused id is not mistaken for the earlier process."""

from __future__ import annotations

import sys

import psutil

_LINUX = sys.platform == "linux"
_LETTERS = {psutil.STATUS_ZOMBIE: "Z", psutil.STATUS_STOPPED: "T"}  # for systems other than Linux

Identity = tuple[int, float]  # process id, start time on a clock that is never adjusted


def identity(pid: int) -> Identity:
    """Return the identity of a running process.

    Raises:
        ProcessLookupError: the process does not exist.
    """
    return pid, state_and_start(pid)[1]


def is_running(who: Identity) -> bool:
    """Return whether this process still runs. A zombie does not count as running."""
    pid, started = who
    try:
        state, start = state_and_start(pid)
    except ProcessLookupError:
        return False
    return start == started and state != "Z"


def state_and_start(pid: int) -> tuple[str, float]:
    """Return the state letter and the start time of a process.

    On Linux the start time is in clock ticks since boot. psutil's `create_time()` is wall time, which changes when the
    clock is adjusted. Then a rank would mistake its living owner for another process.

    Raises:
        ProcessLookupError: the process does not exist.
    """
    if _LINUX:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()  # the command name may contain any characters
        except (FileNotFoundError, ProcessLookupError):
            raise ProcessLookupError(f"no process {pid}") from None
        return fields[0].decode(), float(fields[19])
    try:
        process = psutil.Process(pid)
        return _LETTERS.get(process.status(), "R"), process.create_time()
    except psutil.NoSuchProcess:
        raise ProcessLookupError(f"no process {pid}") from None
