"""Tell whether the kernel's OOM killer has ended a process of this host, from the counters of the system.

| counter | counts |
|---|---|
| `memory.events` of the cgroup (version 2), `memory.oom_control` (version 1) | processes that were killed in it |
| `/proc/vmstat` | processes that were killed on this machine |
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from pathlib import Path

from ddp_notebook.records.shortages import cgroups, memory_limit

_MIB = 1 << 20
_LOOK_S = 10.0
_RECENT_S = 2 * _LOOK_S  # an older kill explains no death: to free the memory of a process takes seconds
_MOST_RECENT = 100
_MACHINE = Path("/proc/vmstat")


class OomKills:
    """Compares the counters at a death with earlier ones. That of the machine is read every 10 s (0.07 ms).

    Each kill explains one death: several processes may be killed before the first of these deaths is noticed.
    """

    def __init__(self) -> None:
        self._cgroups: list[Path] = []
        with contextlib.suppress(OSError, ValueError):
            self._cgroups = list(cgroups("memory"))
        files = [folder / name for folder in self._cgroups for name in ("memory.events", "memory.oom_control")]
        self._explained = {file: count for file in files if (count := _count(file)) is not None}  # kills by file
        self._of_machine = _count(_MACHINE)
        self._recent: deque[float] = deque(maxlen=_MOST_RECENT)  # times at which kills on the machine were seen
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
        limited = [f"{limit / _MIB:,.0f} MiB (memory of the cgroup {folder})" for folder, limit in limits[:1]]
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
