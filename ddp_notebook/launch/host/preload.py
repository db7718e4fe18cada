"""Imports of a host server, and the facts about its host."""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import socket
import sys
from typing import Any

import psutil

from ddp_notebook.launch import devices
from ddp_notebook.launch.host import open_files
from ddp_notebook.version import __version__

OLDEST_TORCH = "2.11"
# Imports of an engine when its kernel is created, and of its shell at the first cell: 0.1 s in every rank.
_WITH_A_KERNEL = (
    "IPython.core.completerlib",
    "IPython.core.logger",
    "IPython.core.oinspect",
    "IPython.extensions.storemagic",
    "sqlite3",
    "tornado.platform.asyncio",
    "tornado.queues",
)
_TOLD_VARIABLES = (*devices.VISIBLE, "GLOO_SOCKET_IFNAME")  # the placement of ranks depends on these variables


def check_torch(version: str) -> None:
    """Exit if torch is too old, before an import of a missing name fails.

    Args:
        version: such as `"2.13.0+cpu"`.

    Example:
        >>> check_torch("2.9.1")
        Traceback (most recent call last):
        SystemExit: torch 2.9.1 is installed, and ddp_notebook needs 2.11 or later: pip install "torch>=2.11"
    """
    if _release(version) < _release(OLDEST_TORCH):
        raise SystemExit(
            f"torch {version} is installed, and ddp_notebook needs {OLDEST_TORCH} or later: "
            f'pip install "torch>={OLDEST_TORCH}"'
        )


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def preload() -> dict[str, Any]:
    """Import the modules that every rank needs. Returns the facts about this host."""
    query = devices.start_query()
    import torch

    check_torch(torch.__version__)
    import torch._dynamo  # the first DDP or optimizer of a process imports it: 1.0 s on two cores
    import torch.distributed as dist
    import torch.nn.parallel

    from ddp_notebook.rank import imports

    with contextlib.suppress(Exception):  # a rank reports the error
        imports.import_without_debugpy()
    from ddp_notebook.rank import engine, hooks, process  # noqa: F401  # what a rank is
    from ddp_notebook.rank.cell import script_functions
    from ddp_notebook.rank.group import operators

    for name in _WITH_A_KERNEL:
        with contextlib.suppress(Exception):  # a rank reports the error
            importlib.import_module(name)
    for prepare in (
        operators.prepare,
        lambda: script_functions.prepare(hooks.prepare()),  # last, since it inspects all modules
    ):
        with contextlib.suppress(Exception):  # a rank reports the error
            prepare()
    accelerators = devices.Accelerators()
    if torch.version.cuda:
        accelerators = devices.Accelerators(backend="nccl", gpus=tuple(devices.finish_query(query)))
    # built for another accelerator: this does not query the driver
    elif torch.accelerator.current_accelerator() is not None:
        accelerators = devices.ask_torch()
    backends = [name for name in ("gloo", "nccl", "mpi") if getattr(dist, f"is_{name}_available", lambda: False)()]
    if accelerators.gpus and accelerators.backend not in ("nccl", *backends):
        backends.append(accelerators.backend)
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "package": __version__,
        "interfaces": _interfaces(),
        "loopback": "lo" if sys.platform == "linux" else "lo0",
        "env": {name: os.environ[name] for name in _TOLD_VARIABLES if name in os.environ},
        "cores": devices.cores(),
        "machine_cores": os.cpu_count() or 1,
        "open_files": open_files.most(),
        "memory_mib": psutil.virtual_memory().total >> 20,
        "gpus": [gpu.to_json() for gpu in accelerators.gpus],
        "device_backend": accelerators.backend,
        "device_trouble": accelerators.trouble,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "engines_wait": engine.can_wait(),  # engines can run before their controller
        "backends": backends,
    }


def _interfaces() -> dict[str, str]:
    """Return the host's network interfaces, by address."""
    try:
        found = psutil.net_if_addrs()
    except OSError:
        return {}
    return {one.address: name for name, those in found.items() for one in those if one.address}


def start_method(asked: str) -> tuple[str, str]:
    """Return the start method of ranks, "fork" or "spawn", and the reason for "spawn"."""
    if asked == "spawn":
        return "spawn", "DDP_NOTEBOOK_START_METHOD says so"
    if sys.platform != "linux":
        return "spawn", f"forking is not safe on {sys.platform}"
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        return "spawn", f"importing torch left {threads - 1} threads running, and a fork would lose them"
    return "fork", ""
