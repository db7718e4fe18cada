"""What a host is like for those who compare it with others: beside the facts, what may change and what costs time."""

from __future__ import annotations

import getpass
import sys
import time
from pathlib import Path
from typing import Any

import psutil


def look(directory: str, marker: str) -> dict[str, Any]:
    """The reply to a question for it. Call it once torch is imported.

    Args:
        directory: the notebook's; "": only the time is asked for.
        marker: name of a file that the notebook has made there; "": it could not.
    """
    if not directory:
        return {"time_ns": time.time_ns()}
    return {
        "user": _user(),
        "cuda": sys.modules["torch"].version.cuda or "",
        "free_mib": psutil.virtual_memory().available >> 20,
        "has_directory": Path(directory).is_dir(),
        "has_marker": bool(marker) and Path(directory, marker).exists(),
    }


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # an id that no name belongs to, as in containers
        return ""
