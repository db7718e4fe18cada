"""Tell whether a resource limit has ended a process of this host, and which.

| signal | limit |
|---|---|
| SIGXCPU | the soft `RLIMIT_CPU`, which Linux raises by one second with each of these signals |
| SIGKILL | the hard `RLIMIT_CPU` |
| SIGXFSZ | the soft `RLIMIT_FSIZE` |
"""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

_ROUNDING_S = 0.5
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_UTIME, _STIME = 11, 12  # fields of /proc/PID/stat after the name


def explain(pid: int, status: int) -> str:
    """Return a clause about the limit that has ended a process; "" if the signal came from elsewhere.

    Args:
        pid: of a zombie, whose limits can still be read.
        status: its exit status; negative: the signal.
    """
    try:
        if status == -signal.SIGXFSZ:
            size, _ = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            return "" if size == resource.RLIM_INFINITY else f"a file may have {size:,} bytes at most (RLIMIT_FSIZE)"
        if status not in (-signal.SIGXCPU, -signal.SIGKILL):
            return ""
        soft, hard = resource.prlimit(pid, resource.RLIMIT_CPU)
        is_soft = status == -signal.SIGXCPU
        limit_s = soft - 1 if is_soft else hard
        if resource.RLIM_INFINITY in (soft if is_soft else hard, limit_s) or _used_s(pid) < limit_s - _ROUNDING_S:
            return ""
    except (OSError, ValueError, IndexError):
        return ""
    which = "RLIMIT_CPU" if is_soft else "the hard RLIMIT_CPU"
    return f"it has used its limit of {limit_s:,} s of processor time ({which})"


def _used_s(pid: int) -> float:
    """Return the processor time that all threads of a process have used."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return (int(fields[_UTIME]) + int(fields[_STIME])) / _TICKS_PER_S
