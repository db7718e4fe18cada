"""Which clock a process has: on Linux all processes of one boot of a machine share the monotonic one."""

from __future__ import annotations

import socket
from pathlib import Path


def boot_id() -> str:
    """The same for processes whose `time.monotonic_ns` is the same clock; where that is not known, like no other's."""
    try:
        return f"{socket.gethostname()}/{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
    except OSError:
        return ""
