"""Host servers that wait: here one that `%load_ext` has started, so that torch is imported when `%ddp_start` comes; on
other machines those of the last session.

They hold no GPU and no port, and end with the notebook's kernel. Variables that torch or Python reads at import have no
effect on ranks that are forked afterwards: when one has changed, a fresh server is started.
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

FAR_WAITS_S = 600.0  # a machine that is not the notebook's own keeps a server without ranks for so long
_ANSWER_S = 5.0
_TRIAL_RANKS, _TRIAL_S = 2, 1.0

_lock = threading.Lock()
_waiting: Host | None = None
_is_preparing = False  # `%load_ext` was called: there is a notebook, which may start again what it has stopped
_far: dict[Hashable, tuple[Host, threading.Timer]] = {}  # with what ends their wait


def is_wanted() -> bool:
    """Whether `%load_ext` is to start a server: DDP_NOTEBOOK_PRELOAD=0 turns that off."""
    return os.environ.get("DDP_NOTEBOOK_PRELOAD", "1") != "0"


def prepare(env: Mapping[str, str] | None = None) -> None:
    """Start a server in the background, unless one waits already."""
    global _waiting, _is_preparing
    with _lock:
        _is_preparing = True
        if _waiting is None or not _waiting.is_alive:
            _waiting = Host(LocalTransport(dict(os.environ) if env is None else env))


def import_in_background(*modules: str) -> None:
    """Import modules in a thread, while the host server imports torch: the first %ddp_start then begins at once."""

    def work() -> None:
        for module in modules:
            importlib.import_module(module)

    # No daemon: a process that ends during an import could hang on the import's lock.
    threading.Thread(target=work, name="ddp-import").start()


def prepare_anew(env: Mapping[str, str]) -> Host:
    """Start a server with this environment in place of the one that waits, if that has another. Returns the one that
    waits now."""
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
    """The waiting server if its imports have seen the same variables, else a fresh one.

    Returns:
        The server, which now belongs to the caller, and whether to give it back when the session ends.
    """
    global _waiting
    with _lock:
        host, _waiting = _waiting, None
    if host is None:
        return Host(LocalTransport(env)), False
    host.resume()  # it was stopped while it waited
    if host.fits(env):
        return host, True
    host.close()
    return Host(LocalTransport(env)), True


def give_back(host: Host, *, healthy: bool = True) -> None:
    """Let the server of a session that has ended wait for the next one. It is replaced if variables have changed.

    Args:
        host: the server.
        healthy: it has ended all that it had started; if not, it is replaced too.
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
    """The server of another machine that waits with this key, if it has the environment that a new one would have. It
    now belongs to the caller."""
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
    """Let a server of another machine wait for the next session that asks for one with this key, or end it.

    Args:
        key: all that it was started with.
        host: the server, which has ended all that it had started.
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
    """It has waited long enough, if it still does."""
    with _lock:
        if _far.get(key, (None,))[0] is not host:
            return
        del _far[key]
    host.close()


def drop() -> None:
    """End the servers that wait."""
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
