"""Memory and load of a rank, its GPU and its host. Nothing here waits for a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psutil
import torch

from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import contextlib, math, os, resource, time

# Readings per second of all idle ranks on a core: 64 ranks on two cores took 2 % of `pass` with one reading a second
# each.
_RANKS_A_SECOND = 8
_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 10_000_000


def cores() -> int:
    """Return the number of cores that this process may use; 0 if unknown."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0


def idle_s(local_world_size: int, cores: int) -> float:
    """Return the seconds between two readings of an idle rank: more than one if many ranks share a core.

    Example:
        >>> idle_s(local_world_size=4, cores=2), idle_s(local_world_size=64, cores=2)
        (1.0, 4.0)
    """
    return max(1.0, local_world_size / max(1, cores) / _RANKS_A_SECOND)


def counts_faults(env: Mapping[str, str]) -> bool:
    """Return whether variables of glibc's `malloc` could prevent page faults: glibc is used, and they are not set."""
    with contextlib.suppress(ValueError, OSError, AttributeError):  # another system has no such name
        return str(os.confstr("CS_GNU_LIBC_VERSION")).startswith("glibc") and "MALLOC_TRIM_THRESHOLD_" not in env
    return False


def _scheduled() -> dict[str, int]:
    """Return the columns of the scheduler's statistics; 0 if this system does not provide them.

    Source: https://docs.kernel.org/scheduler/sched-stats.html (`/proc/<pid>/schedstat`: time on the CPU, and time spent
    waiting on a runqueue), https://man7.org/linux/man-pages/man5/proc_stat.5.html
    """
    found = {"ready_ns": 0, "ran_ns": 0, "host_busy_ns": 0, "host_cores": os.cpu_count() or 0}
    with contextlib.suppress(OSError, ValueError, IndexError):
        found["ready_ns"] = int(_read("/proc/self/schedstat").split()[1])  # time of the main thread
        with open("/proc/stat", encoding="ascii") as file:
            ticks = [int(word) for word in file.readline().split()[1:9]]
        user, nice, system, _idle, _iowait, irq, softirq, _stolen = ticks
        found["host_busy_ns"] = (user + nice + system + irq + softirq) * _TICK_NS
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)  # such as the workers of an earlier epoch
        ran_ns = time.process_time_ns() + int((ended.ru_utime + ended.ru_stime) * 1e9)
        with contextlib.suppress(OSError):  # a kernel without this file: children count as other processes
            for pid in _read(f"/proc/self/task/{os.getpid()}/children").split():
                with contextlib.suppress(OSError, IndexError):  # it has just ended
                    # utime, stime, and those of its ended children; `getrusage` includes all four once it has ended
                    times = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()[11:15]
                    ran_ns += sum(map(int, times)) * _TICK_NS
        found["ran_ns"] = ran_ns
    return found


def _read(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read()


class Resources:
    """Resources of the process that makes this object. Each `row` reads them once."""

    def __init__(self) -> None:
        self._process = psutil.Process(os.getpid())  # without it, psutil calls functions that a cell may have replaced
        self._process.cpu_percent()  # the first value is meaningless
        self._cores = cores()
        self._counts_faults = counts_faults(os.environ)
        self._nvml: Any = None
        self._handles: dict[int, Any] = {}

    def row(self, rank: int) -> dict[str, Any]:
        """Return the columns of a row of `records.RESOURCE`."""
        memory = psutil.virtual_memory()
        columns: dict[str, Any] = {
            "rank": rank,
            "time_ns": time.monotonic_ns(),
            "rss_bytes": self._process.memory_info().rss,
            "cpu_percent": self._process.cpu_percent(),
            "host_used_bytes": memory.total - memory.available,
            "host_total_bytes": memory.total,
            "gpu_allocated_bytes": -1,
            "gpu_reserved_bytes": -1,
            "gpu_peak_bytes": -1,
            "gpu_percent": math.nan,
            "cores": self._cores,
            **_scheduled(),
            "page_faults": resource.getrusage(resource.RUSAGE_SELF).ru_minflt if self._counts_faults else 0,
        }
        if torch.cuda.is_initialized():
            device = max(range(torch.cuda.device_count()), key=torch.cuda.memory_reserved)  # not the current device
            columns |= {
                "gpu_allocated_bytes": torch.cuda.memory_allocated(device),
                "gpu_reserved_bytes": torch.cuda.memory_reserved(device),
                "gpu_peak_bytes": torch.cuda.max_memory_allocated(device),
                "gpu_percent": self._percent(device),
            }
        return columns

    def _percent(self, device: int) -> float:
        """Return the percentage of time in which a kernel ran, from NVML; NaN without `nvidia-ml-py`."""
        with contextlib.suppress(Exception):  # NVML is optional, and its version may differ
            if self._nvml is None:
                import pynvml

                pynvml.nvmlInit()
                self._nvml = pynvml
            if device not in self._handles:
                uuid = str(torch.cuda.get_device_properties(device).uuid)
                self._handles[device] = self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
            return float(self._nvml.nvmlDeviceGetUtilizationRates(self._handles[device]).gpu)
        return math.nan
