"""What a host server imports, and what it then knows about its host."""

from __future__ import annotations

import os
import platform
import socket
import sys
from typing import Any

import psutil

from ddp_notebook.launch import devices


def preload() -> dict[str, Any]:
    """Import what every rank needs. Returns the facts about this host."""
    query = devices.start_query()
    import torch
    import torch._dynamo  # the first DDP or optimizer of a process imports it: 1.0 s on two cores
    import torch.distributed as dist
    import torch.nn.parallel

    import ddp_notebook.launch.controller
    import ddp_notebook.rank.engine  # noqa: F401

    gpus = devices.finish_query(query) if torch.version.cuda else []
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "cores": devices.cores(),
        "memory_mib": psutil.virtual_memory().total >> 20,
        "gpus": [gpu.to_json() for gpu in gpus],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "backends": [
            name for name in ("gloo", "nccl", "mpi") if getattr(dist, f"is_{name}_available", lambda: False)()
        ],
    }


def start_method(asked: str) -> tuple[str, str]:
    """How ranks are started, "fork" or "spawn", and why."""
    if asked == "spawn":
        return "spawn", "DDP_NOTEBOOK_START_METHOD says so"
    if sys.platform != "linux":
        return "spawn", f"forking is not safe on {sys.platform}"
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        return "spawn", f"importing torch left {threads - 1} threads running, and a fork would lose them"
    return "fork", ""
