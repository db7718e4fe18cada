"""What runs as ssh, and what it knows of a host.

`DDP_NOTEBOOK_SSH` is the command, else that of the site's file, else "ssh"; `ssh -F FILE` for a configuration of its
own.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess

from ddp_notebook.launch.defaults import file

_READ_S = 5.0  # what ssh gets to read its configuration


def ssh_command() -> list[str]:
    """The command that is run as ssh, with its first options."""
    return shlex.split(os.environ.get("DDP_NOTEBOOK_SSH") or file.read().ssh or "ssh")


def host_name(destination: str) -> str:
    """The name or address that ssh connects to: what its configuration makes of this one. OpenSSH connects to nothing
    for that."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = [*ssh_command(), "-G", "--", destination]
        asked = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_READ_S)
        settings = asked.stdout.decode(errors="replace").splitlines()
        return dict(line.partition(" ")[::2] for line in settings).get("hostname", destination)
    return destination
