"""What this process is: a notebook's kernel, with somebody at its front end or run by a program, or neither."""

from __future__ import annotations

import sys
from typing import Any


def ipython() -> Any:
    """IPython's shell; None where there is none. IPython is not imported for the question."""
    return sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None


def kernel() -> Any:
    """The notebook's kernel that this process is; None in a terminal or a script."""
    return getattr(ipython(), "kernel", None)


def has_front_end() -> bool:
    """Whether somebody looks. What runs a notebook by itself (nbclient, papermill, nbconvert) says that nobody can
    type; there is no other sign of it."""
    if (running := kernel()) is None:
        return False
    content = (running.get_parent() or {}).get("content") or {}
    return bool(content.get("allow_stdin", True))
