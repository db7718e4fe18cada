"""A client of the session's store, which asks no name service.

torch's client looks up the name of the address that it has connected to, to have it for messages (`::ffff:127.0.0.1`
has none in any `/etc/hosts`). Where the service is slow, or leaves some of 64 questions at once unanswered, each rank
waits for it for 5 s and more.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported at run time

from ddp_notebook.rank.group.cpp_log import quiet
from ddp_notebook.stdlib import contextlib, ctypes
from ddp_notebook.wire.events import Form

_TIMEOUT = timedelta(seconds=300)  # torch's own for a store
_RES_INIT = 1


class _ResolverState(ctypes.Structure):
    """How glibc's `struct __res_state` begins. Source: https://man7.org/linux/man-pages/man3/resolver.3.html"""

    _fields_ = [("retrans", ctypes.c_int), ("retry", ctypes.c_int), ("options", ctypes.c_ulong)]


def connect(place: Form, timeout: timedelta = _TIMEOUT) -> TCPStore:
    """A connection to the store where the ranks of the session meet.

    Args:
        timeout: of what is asked of it.

    Raises:
        torch.distributed.DistNetworkError: nobody listens there.
    """
    with quiet(), _without_names():  # torch warns where an address has no name
        return TCPStore(place.store_host, place.store_port, is_master=False, timeout=timeout, wait_for_workers=False)


@contextlib.contextmanager
def _without_names() -> Iterator[None]:
    """Let no question of this thread reach a name service. Without glibc's resolver they all do."""
    try:
        libc = ctypes.CDLL(None)
        libc.__res_state.restype = ctypes.POINTER(_ResolverState)
        state = libc.__res_state().contents  # of this thread
        if not state.options & _RES_INIT:
            libc.__res_init()
    except AttributeError:
        yield
        return
    attempts, state.retry = state.retry, 0
    try:
        yield
    finally:
        state.retry = attempts
