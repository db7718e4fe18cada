"""Identity of a process's monotonic clock. On Linux all processes of one boot of a machine share this clock."""

from __future__ import annotations

from pathlib import Path

from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import socket


def boot_id() -> str:
    """Return a text that is equal for processes with the same `time.monotonic_ns` clock; empty if unknown."""
    try:
        return f"{socket.gethostname()}/{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
    except OSError:
        return ""
