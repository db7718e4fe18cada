"""The host server that waits: started by `%load_ext`, so that torch is imported when `%ddp_start` comes.

It holds no GPU and no port, and ends with the notebook's kernel. Variables that torch or Python reads at import have no
effect on ranks that are forked afterwards: when one has changed, a fresh server is started.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Mapping

from ddp_notebook.launch.host.host import Host
from ddp_notebook.launch.ways.local import Local

_lock = threading.Lock()
_waiting: Host | None = None


def is_wanted() -> bool:
    """Whether `%load_ext` is to start a server: DDP_NOTEBOOK_PRELOAD=0 turns that off."""
    return os.environ.get("DDP_NOTEBOOK_PRELOAD", "1") != "0"


def prepare(env: Mapping[str, str] | None = None) -> None:
    """Start a server in the background, unless one waits already."""
    global _waiting
    with _lock:
        if _waiting is None or not _waiting.is_alive:
            _waiting = Host(Local(dict(os.environ) if env is None else env))


def take(env: Mapping[str, str]) -> tuple[Host, bool]:
    """The waiting server if its imports have seen the same variables, else a fresh one.

    Returns:
        The server, which now belongs to the caller, and whether to give it back when the session ends.
    """
    global _waiting
    with _lock:
        host, _waiting = _waiting, None
    if host is None:
        return Host(Local(env)), False
    host.resume()  # it was stopped while it waited
    if host.fits(env):
        return host, True
    host.close()
    return Host(Local(env)), True


def give_back(host: Host, *, healthy: bool = True) -> None:
    """Let the server of a session that has ended wait for the next one. It is replaced if variables have changed.

    Args:
        host: the server.
        healthy: it has ended all that it had started; if not, it is replaced too.
    """
    global _waiting
    host.release()
    fits = healthy and host.fits(os.environ)
    with _lock:
        if fits and _waiting is None:
            _waiting = host
            return
    host.close()
    prepare()


def drop() -> None:
    """End the waiting server."""
    global _waiting
    with _lock:
        host, _waiting = _waiting, None
    if host is not None:
        host.close()


atexit.register(drop)
