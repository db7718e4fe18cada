"""Facts about a host for the preflight check that may change, or that take time to collect."""

from __future__ import annotations

import getpass
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from ddp_notebook.messages.encoding import Message
from ddp_notebook.messages.hosts import ClockRequest, ClockTimeReply, SiteReply, SiteRequest

# Files that shape the environment of a shell started by ssh, and so of the server and its ranks.
_SHAPING = (
    "~/.bashrc", "~/.bash_profile", "~/.bash_login", "~/.profile", "~/.zshenv", "~/.zprofile", "~/.zshrc", "~/.cshrc",
    "~/.tcshrc", "~/.config/fish/config.fish", "~/.ssh/environment", "~/.ssh/rc", "~/.pam_environment",
    "/etc/environment", "/etc/profile", "/etc/bash.bashrc", "/etc/bashrc", "/etc/zsh/zshenv",
)  # fmt: skip


def _stamps() -> list[tuple[int, int] | None]:
    """Return the time stamps of these files."""
    return [_stamp(os.path.expanduser(path)) for path in _SHAPING]


def _stamp(path: str) -> tuple[int, int] | None:
    try:
        its = os.stat(path)
    except OSError:
        return None
    return its.st_mtime_ns, its.st_size


_at_start = _stamps()  # taken at the server's import of this module


def _look(request: SiteRequest) -> SiteReply:
    return SiteReply(
        user=_user(),
        cuda=sys.modules["torch"].version.cuda or "",
        free_mib=psutil.virtual_memory().available >> 20,
        has_directory=Path(request.directory).is_dir(),
        has_marker=bool(request.marker) and Path(request.directory, request.marker).exists(),
    )


def _tell_time(_: ClockRequest) -> ClockTimeReply:
    return ClockTimeReply(time_ns=time.time_ns(), is_outdated=_stamps() != _at_start)


HANDLERS: dict[type[Message], Callable[[Any], Message]] = {SiteRequest: _look, ClockRequest: _tell_time}


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # the user id has no name, as in containers
        return ""
