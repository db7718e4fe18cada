"""The GPUs of this host, found without creating a CUDA context and without importing torch.

A context in the host server would be inherited broken by every rank, so the driver's own tool is asked instead.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

_FIELDS = ("index", "uuid", "name", "memory.total")
_QUERY = [f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as the driver knows it."""

    index: int  # the driver's number
    uuid: str  # "GPU-..."
    name: str
    memory_mib: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def start_query() -> subprocess.Popen[str] | None:
    """Ask the driver in the background; `finish_query` reads the answer. None where there is no driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    return subprocess.Popen(
        [tool, *_QUERY], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def finish_query(query: subprocess.Popen[str] | None, timeout_s: float = 20.0) -> list[Gpu]:
    """The GPUs that the driver listed. None when it cannot answer."""
    if query is None:
        return []
    try:
        out, _ = query.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        query.kill()
        query.communicate()
        return []
    return parse_query(out) if query.returncode == 0 else []


def parse_query(text: str) -> list[Gpu]:
    """Read `nvidia-smi --query-gpu=index,uuid,name,memory.total --format=csv,noheader,nounits`.

    Example:
        >>> parse_query("0, GPU-5f2a, NVIDIA H200, 143771")[0].memory_mib
        143771
    """
    gpus = []
    for line in text.strip().splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) != len(_FIELDS) or not parts[0].isdigit():
            continue  # a remark of the tool's, such as "No devices were found"
        index, uuid, name, memory = parts
        gpus.append(Gpu(index=int(index), uuid=uuid, name=name, memory_mib=int(memory) if memory.isdigit() else 0))
    return gpus


def visible(gpus: Sequence[Gpu], setting: str | None = None) -> list[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, in its order.

    Args:
        gpus: all GPUs of the host.
        setting: the variable's value; None means that it is not set. Numbers count the driver's list, `GPU-`
            names may be cut short, and the list ends at the first entry that names no GPU.

    Source: https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-environment-variables
    """
    if setting is None:
        return list(gpus)
    chosen: list[Gpu] = []
    for part in (part.strip() for part in setting.split(",")):
        gpu = find(gpus, part)
        if gpu in chosen:
            return []  # as CUDA: a list that repeats itself shows nothing
        if gpu is None:
            break
        chosen.append(gpu)
    return chosen


def find(gpus: Sequence[Gpu], name: str) -> Gpu | None:
    """The GPU at position `name`, or the one whose UUID begins with it. A MIG slice is taken as it is named."""
    if name.startswith("MIG-"):
        return Gpu(index=-1, uuid=name, name="MIG slice", memory_mib=0)
    if name.isdecimal() and len(name) < 10:
        return gpus[int(name)] if int(name) < len(gpus) else None
    matches = [gpu for gpu in gpus if name.startswith("GPU-") and gpu.uuid.startswith(name)]
    return matches[0] if len(matches) == 1 else None


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
