"""What this process is: a notebook's kernel, with somebody at its front end or run by a program, or neither."""

from __future__ import annotations

import sys
from typing import Any


def ipython() -> Any:
    """IPython's shell, or None. Does not import IPython."""
    return sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None


def kernel() -> Any:
    """The kernel, if this process is one; None in a terminal or a script."""
    return getattr(ipython(), "kernel", None)


def has_front_end() -> bool:
    """Whether somebody is at the front end. Programs that run notebooks (nbclient, papermill, nbconvert) say that
    nobody can type; there is no other sign of them."""
    if (running := kernel()) is None:
        return False
    content = (running.get_parent() or {}).get("content") or {}
    return bool(content.get("allow_stdin", True))
