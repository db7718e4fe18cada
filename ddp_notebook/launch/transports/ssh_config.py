"""The ssh command, and the host name from its configuration.

The command is `DDP_NOTEBOOK_SSH`, else that of the defaults file, else "ssh". `ssh -F FILE` selects a configuration.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess

from ddp_notebook.launch.defaults import file

_READ_S = 5.0  # time limit for ssh to read its configuration


def ssh_command() -> list[str]:
    """Return the ssh command with its first options."""
    return shlex.split(os.environ.get("DDP_NOTEBOOK_SSH") or file.read().ssh or "ssh")


def host_name(destination: str) -> str:
    """Return the name or address that ssh connects to for this destination, from its configuration.

    OpenSSH does not connect for this query.
    """
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = [*ssh_command(), "-G", "--", destination]
        asked = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_READ_S)
        settings = asked.stdout.decode(errors="replace").splitlines()
        return dict(line.partition(" ")[::2] for line in settings).get("hostname", destination)
    return destination
