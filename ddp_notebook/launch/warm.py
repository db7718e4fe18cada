"""Idle host servers: a local one, started by `%load_ext`, so that torch is imported before `%ddp_start`, and the
servers of the last session on other machines.

They hold no GPU and no port, and end with the notebook's kernel. Variables that torch or Python reads at import have no
effect on ranks that are forked afterwards. If one has changed, a fresh server is started.
"""

from __future__ import annotations

import atexit
import importlib
import os
import threading
from collections.abc import Hashable, Mapping

from ddp_notebook.errors import HostError
from ddp_notebook.launch.host.host import Host
from ddp_notebook.launch.transports.local import LocalTransport
from ddp_notebook.messages.hosts import ClockRequest, ClockTimeReply, DoneReply, TrialRequest

FAR_WAITS_S = 600.0  # idle time limit of a server on another machine
_ANSWER_S = 5.0
_TRIAL_RANKS, _TRIAL_S = 2, 1.0

_lock = threading.Lock()
_waiting: Host | None = None
_is_preparing = False  # `%load_ext` was called: this is a notebook, so a new idle server may be started later
_far: dict[Hashable, tuple[Host, threading.Timer]] = {}  # with the timer that ends each


def is_wanted() -> bool:
    """Return whether `%load_ext` starts a server: DDP_NOTEBOOK_PRELOAD=0 turns this off."""
    return os.environ.get("DDP_NOTEBOOK_PRELOAD", "1") != "0"


def prepare(env: Mapping[str, str] | None = None) -> None:
    """Start a server in the background, unless an idle one exists."""
    global _waiting, _is_preparing
    with _lock:
        _is_preparing = True
        if _waiting is None or not _waiting.is_alive:
            _waiting = Host(LocalTransport(dict(os.environ) if env is None else env))


def import_in_background(*modules: str) -> None:
    """Import modules in a thread, while the host server imports torch, so that the first %ddp_start begins at once."""

    def work() -> None:
        for module in modules:
            importlib.import_module(module)

    # Not a daemon thread: a process that ends during an import could hang on the import lock.
    threading.Thread(target=work, name="ddp-import").start()


def prepare_anew(env: Mapping[str, str]) -> Host:
    """Replace the idle server if its environment differs, and return the idle server."""
    global _waiting
    with _lock:
        before, host = None, _waiting
        if host is None or not host.fits(env):
            before, host = host, Host(LocalTransport(env))
            _waiting = host
    if before is not None:
        before.close()
    return host


def claim(env: Mapping[str, str]) -> tuple[Host, bool]:
    """Return the idle server if it has imported torch with the same variables, else a fresh one.

    Returns:
        The server, which now belongs to the caller, and whether to give it back when the session ends.
    """
    global _waiting
    with _lock:
        host, _waiting = _waiting, None
    if host is None:
        return Host(LocalTransport(env)), False
    host.resume()  # it may have been stopped (SIGSTOP) while idle
    if host.fits(env):
        return host, True
    host.close()
    return Host(LocalTransport(env)), True


def give_back(host: Host, *, healthy: bool = True) -> None:
    """Keep the server of an ended session for the next one. It is replaced if variables have changed.

    Args:
        host: the server.
        healthy: the server has ended everything that it had started; if not, it is replaced too.
    """
    global _waiting
    host.release()
    fits = healthy and host.fits(os.environ) and _can_start(host)
    with _lock:
        if fits and _waiting is None:
            _waiting = host
            return
    host.close()
    prepare()


def _can_start(host: Host) -> bool:
    """Return whether a host server has descriptors, processes and disk for another session."""
    try:
        host.request(TrialRequest(ranks=_TRIAL_RANKS), DoneReply, timeout_s=_TRIAL_S)
    except HostError:
        return False
    return True


def take_far(key: Hashable) -> Host | None:
    """Return the idle server of another machine with this key; None if there is none with a current environment.

    The server then belongs to the caller.
    """
    with _lock:
        host, timer = _far.pop(key, (None, None))
    if host is None or timer is None:
        return None
    timer.cancel()
    if not host.trouble() and not _is_outdated(host):
        return host
    host.close()
    return None


def _is_outdated(host: Host) -> bool:
    try:
        return host.request(ClockRequest(), ClockTimeReply, timeout_s=_ANSWER_S).is_outdated
    except HostError:
        return True


def give_back_far(key: Hashable, host: Host) -> None:
    """Keep a server of another machine for the next session with this key, or end it.

    Args:
        key: all options that it was started with.
        host: the server, which has ended everything that it had started.
    """
    host.release()
    host.folder = ""
    host.transport.unreach()
    timer = threading.Timer(FAR_WAITS_S, _drop_far, (key, host))
    timer.daemon = True
    with _lock:
        if waits := _is_preparing and host.is_alive and not host.is_unreachable and key not in _far:
            _far[key] = host, timer
            timer.start()
    if not waits:
        host.close()


def _drop_far(key: Hashable, host: Host) -> None:
    """End an idle server after its time limit, if it is still idle."""
    with _lock:
        if _far.get(key, (None,))[0] is not host:
            return
        del _far[key]
    host.close()


def drop() -> None:
    """End all idle servers."""
    global _waiting, _is_preparing
    with _lock:
        here, _waiting, _is_preparing = _waiting, None, False
        hosts = [*(host for host, _ in _far.values()), *filter(None, [here])]
        for _, timer in _far.values():
            timer.cancel()
        _far.clear()
    for host in hosts:
        host.close()


atexit.register(drop)
