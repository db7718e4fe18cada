"""Waits that an interrupt of Python can end.

A wait in C++ does not notice the signal. So the main thread waits in Python until the event has occurred, and then
calls the original function.

| wait | in Python |
|---|---|
| `torch.futures.Future.wait`, also used by `wait_all` and RPC | a queue, filled by the future's callback |
| `wait`, `get`, `multi_get` of `FileStore` and `HashStore`, also below a `PrefixStore` | polls the keys |
| `TCPStore` client, before its server listens | retries to connect |

A wait at a server, or for the other workers of a `TCPStore`, is ended by closing its socket (`connections`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore

from ddp_notebook.rank.group.held_time import CLOCK
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import contextlib, functools, os, socket, threading, time

_SHORTEST_S, _LONGEST_S = 0.0002, 0.01  # interval between two polls of a store, which itself polls every 10 ms
_MOST_S = 3600.0  # limit of one connection attempt: Python rejects more than 292 years
_LONGEST_RETRY_S = 0.5  # longest pause between two attempts to connect; torch doubles its pause too
_AT_ONCE = timedelta(milliseconds=1)
_main = threading.main_thread().ident
_wait_for_future = torch._C.Future.wait
_wait, _get, _multi_get = Store.wait, Store.get, Store.multi_get


def install() -> None:
    """Replace the waiting functions of torch in this process.

    Raises:
        AttributeError, TypeError: this version of torch has other functions.
    """
    torch._C.Future.wait = wait_for_future  # type: ignore[assignment,method-assign]
    for kind in (FileStore, HashStore, PrefixStore, TCPStore):  # subclasses that inherit them
        kind.wait, kind.get, kind.multi_get = wait, get, multi_get  # type: ignore[assignment,method-assign]
    TCPStore.__init__ = _around_connect(TCPStore.__init__)  # type: ignore[method-assign]


def notice_interrupt() -> None:
    """Let Python notice SIGINT after a wait in C++ that ended because its connection was closed.

    Python checks for signals when it calls a Python function. This call is that function, so that the interrupt does
    not end the first function of the user's clean-up.
    """


# ---- threads whose waits can be ended: the main one, by its signal, and others for as long as they say so

# Queue that gets an item when the awaited event occurs, or when the wait must end. Unlike a lock, it accepts two items.
# Each wait has its own queue. Otherwise a thread could take the item of another wait, and would then block in C++.
Came = SimpleQueue[Any]
_others: dict[int, Came | None] = {}  # queue of the current wait, by thread


def can_end() -> bool:
    """Return whether a wait of this thread in Python can be ended."""
    thread = threading.get_ident()
    return thread == _main or thread in _others


def begin(thread: int) -> None:
    """Allow `interrupt` to end the waits of this thread from now on."""
    _others.setdefault(thread, None)


def end(thread: int) -> None:
    """Revoke `begin` for this thread."""
    _others.pop(thread, None)


def interrupt(thread: int) -> None:
    """End the current wait of a thread, in which an exception is about to be raised."""
    if (came := _others.get(thread)) is not None:
        came.put(None)


def wait_until(begin: Callable[[Callable[..., None]], object]) -> None:
    """Wait until an asynchronous task is done.

    Args:
        begin: starts the task. Its argument is the callback for the task's end, callable from any thread. It is a
            builtin: in a C++ thread a Python function costs 4 to 24 us.
    """
    came: Came = SimpleQueue()
    begin(functools.partial(next, map(came.put, (None,))))
    _wait_for(came)


def _wait_for(came: Came, limit_s: float | None = None) -> None:
    thread = threading.get_ident()
    if thread in _others:
        _others[thread] = came
    with contextlib.suppress(Empty):
        came.get(timeout=limit_s)


# ---- futures


Explain = Callable[[Any, RuntimeError], BaseException | None]
explain: Explain = lambda future, error: None  # noqa: E731 - returns a better error for a failed future, or None
# Return the queue that the end of this future already fills. This saves another callback (3 us in the thread that sets
# the future). Only the first waiting thread gets it.
came_of: Callable[[Any], Came | None] = lambda future: None  # noqa: E731
# Called with the future's value or error.
on_waited: Callable[[Any, Any, Exception | None], None] = lambda future, value, error: None  # noqa: E731


def wait_in_time(future: torch._C.Future[Any], limit_s: float) -> bool:
    """Wait in Python until a future is set, without reading its value or error.

    Args:
        future: a torch future.
        limit_s: time limit in seconds; 0 for no limit.

    Returns:
        Whether the future is set.
    """
    if future.done():
        return True
    if (came := came_of(future)) is None:
        came = SimpleQueue()
        future.add_done_callback(functools.partial(next, map(came.put, (None,))))
    _wait_for(came, limit_s or None)
    return bool(future.done())


# Called after a wait for a future, in the same thread, with the start of the wait in ns. None if waits are not
# recorded.
record: Callable[[int], None] | None = None


def wait_for_future(future: torch._C.Future[Any]) -> Any:
    if record is None or future.done():
        return _wait_for_value(future)
    began_ns = time.monotonic_ns()
    try:
        return _wait_for_value(future)
    finally:
        record(began_ns)


def _wait_for_value(future: torch._C.Future[Any]) -> Any:
    if can_end() and not future.done():
        if (came := came_of(future)) is not None:
            _wait_for(came)
        else:
            wait_until(future.add_done_callback)
    try:
        value = _wait_for_future(future)
    except Exception as error:
        on_waited(future, None, error)
        if isinstance(error, RuntimeError) and (better := explain(future, error)) is not None:
            raise better from None
        raise
    on_waited(future, value, None)
    return value


# ---- stores. Messages to the user name these functions.


class StoreWait(NamedTuple):
    """Wait of a thread at a store."""

    call: str  # function of torch: "store.get"
    keys: tuple[str, ...]  # the awaited keys; empty if they are internal
    what: str  # the awaited event, if the thread waits for no keys: "2 processes to connect"
    is_of_session: bool  # only ranks of this session use the store
    began_s: float
    limit_s: float  # 0: none


_store_waits: dict[int, StoreWait] = {}  # by thread
session_stores: set[type[Store]] = set()  # types of stores that only ranks of the session use
# Calls from these folders use internal keys.
_INTERNAL = (os.path.dirname(os.path.dirname(__file__)) + os.sep, os.path.dirname(torch.__file__) + os.sep)


def store_wait(thread: int) -> dict[str, Any]:
    """Return the wait of a thread at a store, as JSON; empty if it waits at none. Callable from any thread."""
    if (wait := _store_waits.get(thread)) is None:
        return {}
    return {
        "call": wait.call,
        "keys": list(wait.keys),
        "what": wait.what,
        "is_of_session": wait.is_of_session,
        "since_s": time.monotonic() - wait.began_s,
        "limit_s": wait.limit_s,
    }


def waits_for_workers() -> list[str]:
    """Return what new stores of this process wait for. Callable from any thread."""
    return [wait.what for wait in list(_store_waits.values()) if wait.call == "TCPStore" and not wait.limit_s]


@contextlib.contextmanager
def waits_at_store(
    call: str, limit_s: float, keys: Sequence[str] = (), *, what: str = "", is_of_session: bool = False
) -> Iterator[None]:
    """Record that this thread waits at a store. See `StoreWait`."""
    thread = threading.get_ident()
    before = _store_waits.get(thread)
    if before is None:
        _store_waits[thread] = StoreWait(call, tuple(keys[:4]), what, is_of_session, time.monotonic(), limit_s)
    try:
        yield
    finally:
        if before is None:
            _store_waits.pop(thread, None)


def wait(store: Store, keys: Sequence[str], *timeout: timedelta) -> None:
    """Replace `Store.wait` by a wait that an interrupt can end."""
    return _at_store(_wait, store, keys, keys, *timeout)


def get(store: Store, key: str) -> bytes:
    """Replace `Store.get` by a wait that an interrupt can end."""
    return _at_store(_get, store, [key], key)


def multi_get(store: Store, keys: Sequence[str]) -> list[bytes]:
    """Replace `Store.multi_get` by a wait that an interrupt can end."""
    return _at_store(_multi_get, store, keys, keys)


def _at_store(original: Callable[..., Any], store: Any, keys: Sequence[str], what: Any, *timeout: timedelta) -> Any:
    limit = timeout[0] if timeout else store.timeout
    caller = sys._getframe(2).f_code.co_filename
    name, shown = (f"store.{original.__name__}", keys) if not caller.startswith(_INTERNAL) else ("", ())
    is_of_session = type(_below(store)) in session_stores
    with waits_at_store(name, limit.total_seconds(), shown, is_of_session=is_of_session):
        return _wait_at_store(original, store, keys, what, limit, *timeout)


def _wait_at_store(
    original: Callable[..., Any], store: Any, keys: Sequence[str], what: Any, limit: timedelta, *timeout: timedelta
) -> Any:
    began_ns = time.monotonic_ns()
    if threading.get_ident() != _main or not _is_in_process(store):
        try:
            return original(store, what, *timeout)
        except dist.DistStoreError as error:
            if not limit or not CLOCK.left_s(limit.total_seconds(), began_ns):
                raise
            _wait_longer(store, keys, limit, began_ns, error)
            return original(store, what, *timeout)
        finally:
            notice_interrupt()
    while not store.check(keys):
        waited_s = CLOCK.elapsed_s(began_ns)
        if limit and waited_s > limit.total_seconds():
            return _expire(original, store, what, limit)
        time.sleep(min(_LONGEST_S, max(_SHORTEST_S, waited_s / 8)))
    return original(store, what, *timeout)


def _wait_longer(store: Any, keys: Sequence[str], limit: timedelta, began_ns: int, error: RuntimeError) -> None:
    """Wait again at a store whose limit was not reached, because a debugger has held it."""
    while left_s := CLOCK.left_s(limit.total_seconds(), began_ns):
        with contextlib.suppress(dist.DistStoreError):
            return _wait(store, list(keys), timedelta(seconds=left_s))
    raise error


def _is_in_process(store: Store) -> bool:
    """Return whether the store has no server."""
    return isinstance(_below(store), FileStore | HashStore)


def _below(store: Store) -> Store:
    """Return the store below the prefixes of this one."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _expire(original: Callable[..., Any], store: Any, what: Any, limit: timedelta) -> Any:
    """Let the store itself raise its timeout error."""
    before = store.timeout
    store.set_timeout(_AT_ONCE)
    try:
        return original(store, what)
    except RuntimeError as error:
        raise type(error)(str(error).replace("after 1 ms", f"after {limit / _AT_ONCE:.0f} ms")) from None
    finally:
        store.set_timeout(before)


# ---- connecting


def _around_connect(connect: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(connect)
    def connect_store(*args: Any, **kwargs: Any) -> None:
        if threading.get_ident() == _main:
            with contextlib.suppress(TypeError):  # wrong arguments: torch raises the error
                _wait_for_listener(*args, **kwargs)
        with waits_at_store("TCPStore", 0.0, what=_clients_of(*args, **kwargs)):
            connect(*args, **kwargs)

    return connect_store


def _clients_of(
    _: Any = None,
    host_name: str = "",
    port: int = 0,
    world_size: int | None = None,
    *rest: Any,
    wait_for_workers: bool = True,
    **__: Any,
) -> str:
    """Describe the processes that a new `TCPStore` waits for. The arguments are those of `TCPStore`."""
    waits_for_workers = rest[2] if len(rest) > 2 else wait_for_workers
    if world_size is None or world_size < 2 or not waits_for_workers:
        return f"a connection to {host_name}:{port}"
    return f"world_size={world_size} processes to connect to {host_name}:{port}"


def _wait_for_listener(
    _: TCPStore,
    host_name: str,
    port: int,
    world_size: int | None = None,
    is_master: bool = False,
    timeout: timedelta = timedelta(seconds=300),
    *__: Any,
    **___: Any,
) -> None:
    """Wait until a server listens at the address of a client. The arguments are those of `TCPStore`.

    Raises:
        DistNetworkError: no server listened in time.
    """
    if is_master:
        return
    with waits_at_store(
        "TCPStore", timeout.total_seconds(), what=f"a server at {host_name}:{port}, where none listens"
    ):
        _try_to_connect(host_name, port, timeout)


def _try_to_connect(host_name: str, port: int, timeout: timedelta) -> None:
    began_ns, pause_s = time.monotonic_ns(), _LONGEST_S
    while True:
        left_s = CLOCK.left_s(timeout.total_seconds(), began_ns)
        try:
            with socket.create_connection((host_name, port), timeout=min(max(left_s, _LONGEST_S), _MOST_S)):
                return
        except OSError as error:
            if left_s <= 0:
                raise dist.DistNetworkError(
                    f"The client socket has timed out after {timeout / _AT_ONCE:.0f}ms while trying to connect to "
                    f"({host_name}, {port}): {error}"
                ) from None
        time.sleep(max(0.0, min(pause_s, left_s)))
        pause_s = min(2 * pause_s, _LONGEST_RETRY_S)
