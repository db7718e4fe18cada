"""Find out why the kernel killed a process of this host.

| changed counter or signal | cause |
|---|---|
| `memory.events` of the cgroup (version 2), `memory.oom_control` (version 1) | the OOM killer, in this cgroup |
| `/proc/vmstat` | the OOM killer, on this machine |
| SIGXCPU | the soft `RLIMIT_CPU`, which Linux raises by one second with each of these signals |
| SIGKILL | the hard `RLIMIT_CPU` |
| SIGXFSZ | the soft `RLIMIT_FSIZE` |
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections import deque
from pathlib import Path

from ddp_notebook.records.shortages import cgroups, memory_limit
from ddp_notebook.records.units import size

_ROUNDING_S = 0.5
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_UTIME, _STIME = 11, 12  # fields of /proc/PID/stat after the name


def explain(pid: int, status: int) -> str:
    """Return a clause about the limit that has ended a process; "" if the signal has another source.

    Args:
        pid: of a zombie, whose limits can still be read.
        status: its exit status; negative: the signal.
    """
    try:
        if status == -signal.SIGXFSZ:
            most, _ = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            return "" if most == resource.RLIM_INFINITY else f"files are limited to {most:,} bytes (RLIMIT_FSIZE)"
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


_LOOK_S = 10.0
_RECENT_S = 2 * _LOOK_S  # an older kill does not explain a death: freeing a process's memory takes seconds
_MOST_RECENT = 100
_MACHINE = Path("/proc/vmstat")


class OomKills:
    """Compares the counters at a death with earlier values. The machine's counter is read every 10 s (0.07 ms).

    Each kill explains one death, because several processes may be killed before the first death is noticed.
    """

    def __init__(self) -> None:
        self._cgroups: list[Path] = []
        with contextlib.suppress(OSError, ValueError):
            self._cgroups = list(cgroups("memory"))
        files = [folder / name for folder in self._cgroups for name in ("memory.events", "memory.oom_control")]
        # file -> kills that are explained
        self._explained = {file: count for file in files if (count := _count(file)) is not None}
        self._of_machine = _count(_MACHINE)
        self._recent: deque[float] = deque(maxlen=_MOST_RECENT)  # times of kills on the machine
        self._looked_s = time.monotonic()

    def look(self) -> None:
        """Read the counter of the machine, at most every 10 s."""
        if time.monotonic() - self._looked_s > _LOOK_S:
            self._read_machine()

    def explain(self) -> str:
        """Return a clause about a process that SIGKILL has ended just now; "" if the OOM killer did not kill it."""
        self._read_machine()
        counts = {file: _count(file) or 0 for file in self._explained}
        if self._of_machine is not None and not self._recent:
            self._explained = counts
            return ""
        if self._recent:
            self._recent.popleft()
        killing = [file for file, count in counts.items() if count > self._explained[file]]
        for file in killing:
            self._explained[file] += 1
        if not killing:
            return (
                "" if self._of_machine is None else "the kernel's OOM killer has just ended a process of this machine"
            )
        limits = [(folder, limit) for folder in self._cgroups if (limit := memory_limit(folder)) is not None]
        limited = [f"{size(limit)} (memory of the cgroup {folder})" for folder, limit in limits[:1]]
        return "the kernel's OOM killer ended it" + "".join(f"; the limit is {words}" for words in limited)

    def _read_machine(self) -> None:
        self._looked_s, before = time.monotonic(), self._of_machine
        self._of_machine = now = _count(_MACHINE)
        if now is not None and before is not None:
            self._recent.extend([self._looked_s] * min(now - before, _MOST_RECENT))
        while self._recent and self._looked_s - self._recent[0] > _RECENT_S:
            self._recent.popleft()


def _count(file: Path) -> int | None:
    """Return the counter `oom_kill` of a file; None: the file does not exist or has none."""
    with contextlib.suppress(OSError, ValueError):
        _, found, rest = (b"\n" + file.read_bytes()).partition(b"\noom_kill ")
        return int(rest.partition(b"\n")[0]) if found else None
    return None
