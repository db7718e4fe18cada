"""Tell whether the kernel's OOM killer has ended a process of this host, from the counters of the system.

| counter | counts |
|---|---|
| `memory.events` of the cgroup (version 2), `memory.oom_control` (version 1) | processes that were killed in it |
| `/proc/vmstat` | processes that were killed on this machine |
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from ddp_notebook.records.shortages import cgroups, memory_limit

_MIB = 1 << 20
_LOOK_S = 10.0
_MACHINE = Path("/proc/vmstat")


class OomKills:
    """Compares the counters at a death with earlier ones. That of the machine is read every 10 s (0.07 ms)."""

    def __init__(self) -> None:
        self._cgroups: list[Path] = []
        with contextlib.suppress(OSError, ValueError):
            self._cgroups = list(cgroups("memory"))
        files = [folder / name for folder in self._cgroups for name in ("memory.events", "memory.oom_control")]
        self._counts = {file: count for file in files if (count := _count(file)) is not None}
        self._of_machine: int | None = None
        self._looked_s = float("-inf")
        self.look()

    def look(self) -> None:
        """Read the counter of the machine if the last time is long ago."""
        if (now := time.monotonic()) - self._looked_s > _LOOK_S:
            self._looked_s, self._of_machine = now, _count(_MACHINE)

    def explain(self) -> str:
        """Return a clause about a process that SIGKILL has ended just now; "" if the OOM killer has not struck."""
        before, self._counts = self._counts, {file: _count(file) or 0 for file in self._counts}
        of_machine, now = self._of_machine, _count(_MACHINE)
        self._of_machine = now
        if now is not None and of_machine is not None and now <= of_machine:
            return ""
        if not any(self._counts[file] > count for file, count in before.items()):
            return "" if now is None else "the kernel's OOM killer has just ended a process of this machine"
        limits = [(folder, limit) for folder in self._cgroups if (limit := memory_limit(folder)) is not None]
        if not limits:
            return "the kernel's OOM killer ended it, since memory had run out"
        folder, limit = limits[0]
        return (
            f"the kernel's OOM killer ended it at the limit of {limit / _MIB:,.0f} MiB (memory of the cgroup {folder})"
        )


def _count(file: Path) -> int | None:
    """Return the counter `oom_kill` of a file; None: the file does not exist or has none."""
    with contextlib.suppress(OSError, ValueError):
        _, found, rest = (b"\n" + file.read_bytes()).partition(b"\noom_kill ")
        return int(rest.partition(b"\n")[0]) if found else None
    return None
