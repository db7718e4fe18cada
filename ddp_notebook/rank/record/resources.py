"""Memory and load of a rank, its GPU and its host. Nothing here waits for a GPU."""

from __future__ import annotations

import contextlib
import math
import time
from typing import Any

import psutil
import torch


class Resources:
    """Looks once a call. Made in the process whose resources they are."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._process.cpu_percent()  # the first value is none
        self._nvml: Any = None
        self._handles: dict[int, Any] = {}

    def look(self, rank: int) -> tuple[Any, ...]:
        """A row of `records.RESOURCE`."""
        memory = psutil.virtual_memory()
        gpu: tuple[Any, ...] = (-1, -1, -1, math.nan)
        if torch.cuda.is_initialized():
            device = torch.cuda.current_device()
            gpu = (
                torch.cuda.memory_allocated(device),
                torch.cuda.memory_reserved(device),
                torch.cuda.max_memory_allocated(device),
                self._percent(device),
            )
        return (
            rank,
            time.monotonic_ns(),
            self._process.memory_info().rss,
            self._process.cpu_percent(),
            memory.total - memory.available,
            memory.total,
            *gpu,
        )

    def _percent(self, device: int) -> float:
        """Of the time in which a kernel ran, as NVML says; NaN without `nvidia-ml-py`."""
        with contextlib.suppress(Exception):  # NVML is optional, and may be of another version
            if self._nvml is None:
                import pynvml

                pynvml.nvmlInit()
                self._nvml = pynvml
            if device not in self._handles:
                uuid = str(torch.cuda.get_device_properties(device).uuid)
                self._handles[device] = self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
            return float(self._nvml.nvmlDeviceGetUtilizationRates(self._handles[device]).gpu)
        return math.nan
