"""Clients of the session's store, as `torch.distributed.Store`.

torch and gloo use a client like any other store: their C++ code calls the Python methods by name. Every wait is in
Python, so an interrupt ends it. All clients of a process share a few connections for their requests. A waiting request
has its own connection and blocks no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from ddp_notebook.messages.ranks import Form
from ddp_notebook.rank.group import waiting
from ddp_notebook.rank.group.held_time import CLOCK
from ddp_notebook.registry import unix_sockets
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import contextlib, functools, hmac, os, secrets, socket, threading, time
from ddp_notebook.wire import store as protocol
from ddp_notebook.wire.store import Sealing, StoreAddress, StoreRefusedError

_TIMEOUT = timedelta(seconds=300)  # torch's default for a store
_CONNECT_S = 10.0
_ANSWER_S = 30.0  # for a request that waits for no key: a slower store is suspended or dead
_MOST_IDLE = 4  # idle connections
_MILLISECOND = timedelta(milliseconds=1)
_LONGEST_S, _SHORTEST_S = 20 * 86400.0, 0.001  # a socket's limit is 25 days in milliseconds, and 0 means no wait
_TIMED_OUT = "wait timeout after"  # text of the torch error

T = TypeVar("T")


class Connection:
    """The client's end of a connection to a store, for one request at a time.

    Args:
        place: address of the store.
        timeout_s: seconds to connect.

    Raises:
        StoreRefusedError: the server is not the session's store.
        OSError: no server listens at the address.
    """

    def __init__(self, place: StoreAddress, timeout_s: float) -> None:
        self.socket = socket.socket(place.family, socket.SOCK_STREAM)
        self.was_shut_down = False
        self._sealing = Sealing(b"", b"", is_server=False)
        try:
            self.socket.settimeout(max(timeout_s, 0.01))
            self.socket.connect(place.address)
            if place.is_unix:
                _check_user(self.socket, place)
            else:
                self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._prove(place)
        except BaseException:
            self.close()
            raise

    def _prove(self, place: StoreAddress) -> None:
        self.socket.settimeout(protocol.PROOF_S)
        key, mine = place.secret, secrets.token_bytes(protocol.KEY_BYTES)
        try:
            other = self._receive(protocol.MOST_BYTES_BEFORE_PROOF)
            nonces = other + mine
            self.socket.sendall(self._sealing.seal(mine + protocol.proof_of_client(key, nonces)))
            is_same = hmac.compare_digest(
                self._receive(protocol.MOST_BYTES_BEFORE_PROOF), protocol.proof_of_server(key, nonces)
            )
        except (TimeoutError, ConnectionError) as error:
            raise StoreRefusedError(
                f"the server at {place.at} did not prove that it is the session's store ({error or 'no answer'}): "
                "the store has ended, or another program uses its address"
            ) from None
        if not is_same:
            raise StoreRefusedError(f"the server at {place.at} does not know the key of this session: do not use it")
        self._sealing = Sealing(key, nonces, is_server=False)

    def ask(self, fields: Sequence[bytes], timeout_s: float | None) -> list[bytes]:
        """Send a request and wait for its reply.

        Args:
            timeout_s: seconds to wait; None for no limit.

        Raises:
            TimeoutError: no reply in time. This connection cannot be used any more.
            StoreRefusedError: the reply was altered in transit.
            ConnectionError: the store has ended, or the connection was closed.
        """
        self.socket.settimeout(None if timeout_s is None or timeout_s > _LONGEST_S else max(timeout_s, _SHORTEST_S))
        self.socket.sendall(self._sealing.seal(protocol.pack(fields)))
        return protocol.unpack(self._sealing.open(self._receive(protocol.MOST_BYTES)))

    def _receive(self, most: int) -> bytes:
        data = bytearray()
        while len(data) < 4 or len(data) < 4 + protocol.length_of(data):
            if len(data) >= 4 and protocol.length_of(data) > most:
                raise StoreRefusedError("a message of the store is longer than any that a store sends")
            more = self.socket.recv(1 << 16)
            if not more:
                raise ConnectionError("Failed to recv, got 0 bytes: the session's store closed the connection")
            data += more
        return bytes(memoryview(data)[4:])

    def shut_down(self) -> None:
        """End the wait of another thread in `ask`."""
        self.was_shut_down = True
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.socket.close()


def _check_user(connection: socket.socket, place: StoreAddress) -> None:
    try:
        unix_sockets.check_user(connection)
    except unix_sockets.AttachSocketError as error:
        raise StoreRefusedError(f"the server at {place.at} is not the session's store: {error}") from None


class _Connections:
    """Connections of this process to stores. A forked child makes its own connections."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[tuple[StoreAddress, Connection]] = []
        self._used: set[Connection] = set()
        os.register_at_fork(after_in_child=self._forget)

    def ask(self, place: StoreAddress, fields: Sequence[bytes], timeout_s: float | None) -> list[bytes]:
        """Send a request to a store and return its reply. See `Connection.ask`."""
        connection = self._connection(place)
        try:
            reply = connection.ask(fields, timeout_s)
        except BaseException:  # also at an interrupt: otherwise the next request would get this reply
            with self._lock:
                self._used.discard(connection)
            connection.close()
            raise
        with self._lock:
            self._used.discard(connection)
            if not connection.was_shut_down:
                self._idle.append((place, connection))
            old = self._idle.pop(0)[1] if len(self._idle) > _MOST_IDLE else None
        if connection.was_shut_down:
            connection.close()
        if old is not None:
            old.close()
        return reply

    def _connection(self, place: StoreAddress) -> Connection:
        with self._lock:
            for at in reversed(range(len(self._idle))):
                if self._idle[at][0] == place:
                    connection = self._idle.pop(at)[1]
                    self._used.add(connection)
                    return connection
        connection = Connection(place, _CONNECT_S)
        with self._lock:
            self._used.add(connection)
        return connection

    def cut(self) -> int:
        """End the requests in progress, in all threads. Return their number."""
        with self._lock:
            for connection in self._used:
                connection.shut_down()
            return len(self._used)

    def close(self) -> None:
        """Close the idle connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for _, connection in idle:
            connection.close()

    def _forget(self) -> None:
        for connection in [*(idle for _, idle in self._idle), *self._used]:
            connection.close()
        self._lock, self._idle, self._used = threading.Lock(), [], set()


_connections = _Connections()
cut = _connections.cut


class SessionStore(Store):
    """Client of the session's store.

    Args:
        place: address of the store.
        timeout: time limit for keys.
        prefix: prefix of all keys of the session; errors show keys without it.
    """

    timeout: timedelta  # missing in the stubs of torch

    def __init__(self, place: StoreAddress, timeout: timedelta = _TIMEOUT, prefix: str = "") -> None:
        super().__init__()
        self._place = place
        self._prefix = prefix
        self.set_timeout(timeout)
        _living.append(self)

    # Operations that wait

    def get(self, key: str) -> bytes:
        return self._wait(b"get", [key], self.timeout)[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._wait(b"get", keys, self.timeout)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._wait(b"wait", keys, self.timeout if timeout is None else timeout)

    # Operations that do not wait

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(b"set", key.encode(), _bytes(value))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        pairs = zip(keys, values, strict=True)
        self._ask(b"set", *(part for key, value in pairs for part in (key.encode(), _bytes(value))))

    def append(self, key: str, value: str | bytes) -> None:
        self._ask(b"append", key.encode(), _bytes(value))

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(b"add", key.encode(), str(amount).encode())[0])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._ask(b"compare_set", key.encode(), _bytes(expected), _bytes(desired))[0]

    def check(self, keys: Sequence[str]) -> bool:
        if hasattr(_probed, "key"):
            [_probed.key] = keys
            return False
        return bool(self._ask(b"check", *(key.encode() for key in keys))[0])

    def delete_key(self, key: str) -> bool:
        return bool(self._ask(b"delete", key.encode())[0])

    def num_keys(self) -> int:
        return int(self._ask(b"count")[0])

    def list_keys(self) -> list[str]:
        return [key.decode() for key in self._ask(b"keys")]

    def queue_push(self, key: str, value: str | bytes) -> None:
        self._ask(b"push", key.encode(), _bytes(value))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        if block:
            return self._wait(b"pop", [key], self.timeout)[0]
        found = self._ask(b"pop now", key.encode())
        if not found:
            raise dist.QueueEmptyError("queue is empty")
        return found[0]

    def queue_len(self, key: str) -> int:
        return int(self._ask(b"length", key.encode())[0])

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> SessionStore:
        return SessionStore(self._place, self.timeout, self._prefix)

    # torch's C++ code calls two methods by other names than its Python code
    deleteKey, getNumKeys = delete_key, num_keys

    def _ask(self, *fields: bytes) -> list[bytes]:
        try:
            with _as_torchs_errors():
                reply = _connections.ask(self._place, fields, _ANSWER_S)
        except TimeoutError:
            raise dist.DistNetworkError(
                f"the session's store did not reply within {_ANSWER_S:g} s: its process is stopped or overloaded"
            ) from None
        if reply and reply[0] == b"error":
            raise dist.DistStoreError(reply[1].decode())
        return reply[1:]

    def _wait(self, request: bytes, keys: Sequence[str], timeout: timedelta) -> list[bytes]:
        left_s = limit_s = timeout.total_seconds() or None  # 0 means no limit in torch
        began_ns = time.monotonic_ns()
        while True:
            try:
                with _as_torchs_errors(), waiting.waits_at_store("", limit_s or 0.0, is_of_session=True):
                    return _connections.ask(self._place, [request, *(key.encode() for key in keys)], left_s)[1:]
            except TimeoutError:
                left_s = CLOCK.left_s(limit_s or 0.0, began_ns)
                if not left_s:
                    raise dist.DistStoreError(
                        f"{_TIMED_OUT} {timeout / _MILLISECOND:.0f}ms, keys: {', '.join(map(self._shown, keys))}"
                    ) from None

    def _shown(self, key: str) -> str:
        """Return a key without the session's prefix and the number of its group, as a `TCPStore` shows it."""
        if not self._prefix or not key.startswith(f"{self._prefix}/"):
            return f"/{key}"
        first, _, rest = key.removeprefix(f"{self._prefix}/").partition("/")
        return f"/{rest}" if first.isdecimal() else f"/{first}/{rest}"


waiting.session_stores.add(SessionStore)
# torch holds clients only in C++ and calls their Python objects, so these must stay alive. Each takes about 1 kB.
_living: list[SessionStore] = []


def connect(place: Form, timeout: timedelta = _TIMEOUT) -> SessionStore:
    """Return a client of the store where the ranks of the session meet. It connects at its first request.

    Args:
        timeout: time limit for keys.
    """
    return SessionStore(StoreAddress(place.store_at, place.store_key), timeout, place.store_prefix)


def is_timeout_of_store(error: BaseException) -> bool:
    """Return whether an error is a timeout of a store: another rank did not set a value in time."""
    return isinstance(error, RuntimeError) and _TIMED_OUT in str(error)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


@contextlib.contextmanager
def _as_torchs_errors() -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        raise
    except StoreRefusedError as error:
        raise dist.DistNetworkError(str(error)) from None
    except OSError as error:
        raise dist.DistNetworkError(f"the session's store cannot be reached: {error}") from None


# ---- what torch does not pass on from a `PrefixStore` to a store in Python

_probed = threading.local()


def install() -> None:
    """Let a `PrefixStore` over a client of the session's store support queues and `list_keys`, as over a `TCPStore`.

    Raises:
        AttributeError: this version of torch has no such methods.
    """
    for name in ("queue_push", "queue_pop", "queue_len"):
        setattr(PrefixStore, name, _of_queue(getattr(PrefixStore, name)))
    PrefixStore.list_keys = _list_keys(PrefixStore.list_keys)  # type: ignore[method-assign,assignment]


def _of_queue(original: Callable[..., T]) -> Callable[..., T]:
    def operation(store: PrefixStore, key: str, *args: Any, **kwargs: Any) -> T:
        client = _client_below(store)
        if client is None:
            return original(store, key, *args, **kwargs)
        ours: Callable[..., T] = getattr(client, original.__name__)
        return ours(_full_key(store, key), *args, **kwargs)

    return functools.wraps(original)(operation)


def _list_keys(original: Callable[[Any], list[str]]) -> Callable[[Any], list[str]]:
    def list_keys(store: PrefixStore) -> list[str]:
        client = _client_below(store)
        if client is None:
            return original(store)
        prefix = _full_key(store, "")
        return [key.removeprefix(prefix) for key in client.list_keys() if key.startswith(prefix)]

    return functools.wraps(original)(list_keys)


def _client_below(store: Any) -> SessionStore | None:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, SessionStore) else None


def _full_key(store: PrefixStore, key: str) -> str:
    """Return a key with the prefixes of this store. torch does not expose them, so `check` of the client records the
    key."""
    _probed.key = None
    try:
        store.check([key])
        return str(_probed.key)
    finally:
        del _probed.key
