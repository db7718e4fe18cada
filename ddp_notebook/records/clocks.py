"""Which clock a process has: on Linux all processes of one boot of a machine share the monotonic one."""

from __future__ import annotations

from pathlib import Path

from ddp_notebook.stdlib import socket


def boot_id() -> str:
    """Equal for processes that share a `time.monotonic_ns` clock; empty where that is not known."""
    try:
        return f"{socket.gethostname()}/{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
    except OSError:
        return ""
