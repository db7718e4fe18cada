"""The process that holds the session's store, so that every rank may die, rank 0 included.

The ranks' groups use the server in this module, which accepts only processes of the session, see `wire.store`.

For programs of the user there is a `TCPStore` at `MASTER_ADDR` and `MASTER_PORT`, as under torchrun. It runs in a child
process, which is started at the first connection, and again after it has ended. This package does not read it: every
user who can connect to it can replace its keys.
"""

from __future__ import annotations

import collections
import contextlib
import hmac
import math
import os
import secrets
import selectors
import signal
import socket
import time
from collections.abc import Callable
from datetime import timedelta

from ddp_notebook.launch import processes
from ddp_notebook.launch.process import NOTICE, describe_status
from ddp_notebook.messages.processes import StoreSpec
from ddp_notebook.registry import unix_sockets
from ddp_notebook.wire import store as protocol
from ddp_notebook.wire.store import Sealing, StoreRefusedError

_PIECE_BYTES = 1 << 18
_SHORT_S = 1.0  # a child that lives for less has failed at startup
_PAUSE_S = 30.0  # shortest pause between two notices of a failed start
_MOST_UNPROVED = 256  # connections; above this number the oldest is closed


def main(spec: StoreSpec) -> None:
    """Serve both stores on the listening sockets that the host server has created."""
    listener = socket.socket(fileno=spec.store_fd)
    server = Server(listener, bytes.fromhex(spec.key))
    ForUsers(server.selector, spec)
    server.serve()


class ForUsers:
    """The TCPStore of the user's programs, in a child process that is started at the first connection.

    A stopped child is resumed at once, because a program that uses the store cannot be interrupted. After the child has
    ended, the next connection starts another. If a child ends right after its start, for lack of memory or threads, the
    waiting connections are closed: they would start one child after the other.

    Args:
        selector: of this process, whose main thread calls this.
        spec: of this process.
    """

    def __init__(self, selector: selectors.BaseSelector, spec: StoreSpec) -> None:
        self._selector, self._spec = selector, spec
        self._listener = socket.socket(fileno=spec.fd)
        self._listener.setblocking(False)
        self._child = 0
        # on the monotonic clock: start of the child; last notice of a failure
        self._started_s = self._failed_s = -math.inf
        self._wake_r, wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # the default action does not write to the wakeup descriptor
        selector.register(self._wake_r, selectors.EVENT_READ, lambda _: self._reap())
        self._listen()

    def _listen(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ, lambda _: self._start())

    def _start(self) -> None:
        self._started_s = time.monotonic()
        try:
            self._child = _serve_users(self._spec)
        except OSError as error:  # no process can be created
            self._fail(f"could not be started: {error.strerror}")
        else:
            self._selector.unregister(self._listener)

    def _fail(self, why: str) -> None:
        """Close the waiting connections, because their clients would wait forever."""
        with contextlib.suppress(OSError):
            while True:
                self._listener.accept()[0].close()
        if time.monotonic() > self._failed_s + _PAUSE_S:
            self._failed_s = time.monotonic()
            self._print(why)

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_r, 4096)
        if not self._child:
            return
        pid, status = os.waitpid(self._child, os.WNOHANG | os.WUNTRACED)
        if not pid:
            return
        if os.WIFSTOPPED(status):
            os.kill(pid, signal.SIGCONT)
            self._print(f"(process {pid}) was stopped and has been resumed; nothing is lost")
        else:
            self._child = 0
            how = describe_status(os.waitstatus_to_exitcode(status))
            if time.monotonic() < self._started_s + _SHORT_S:
                self._fail(f"ended at its start ({how}); the next connection tries it again")
            else:
                self._print(
                    f"(process {pid}) has ended ({how}), and its keys are lost. The next connection starts an empty "
                    "one; groups of ranks do not use it"
                )
            self._listen()

    def _print(self, what: str) -> None:
        text = f"{NOTICE}the TCPStore at MASTER_ADDR and MASTER_PORT (port {self._spec.port}) {what}\n"
        with contextlib.suppress(OSError):
            os.write(2, text.encode())


def _serve_users(spec: StoreSpec) -> int:
    """Serve a TCPStore on the listening socket that the host server has bound, in a child of this process.

    `TCPStore` by itself listens on every interface; a socket handed over in `master_listen_fd` stays where it is.
    Source: https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.TCPStore

    Returns:
        The child's process id.
    """
    parent = os.getpid()
    if pid := os.fork():
        return pid
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        processes.die_with_parent(parent)
        os.closerange(3, spec.fd)  # clients notice the end of this process's parent by the end of their connections
        os.closerange(spec.fd + 1, os.sysconf("SC_OPEN_MAX"))
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported at run time

        os.environ["RES_OPTIONS"] = (
            "attempts:0"  # else the TCPStore resolves the name of each client, and waits for a slow resolver
        )
        store = TCPStore(
            spec.host,
            spec.port,
            world_size=None,
            is_master=True,
            timeout=timedelta(seconds=30),
            wait_for_workers=False,
            master_listen_fd=spec.fd,
        )
        while store is not None:  # forever: the store lives as long as its process
            signal.pause()
    finally:
        os._exit(1)


class _Client:
    """The server's end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.coming = bytearray()
        self.going = bytearray()
        self.sealing = Sealing(b"", b"", is_server=True)
        self.nonce = b""
        self.has_proved = False
        self.waits: tuple[bytes, list[bytes]] | None = None  # a waiting request, and the missing keys
        self.ended = False


class Server:
    """Serves keys and values, and queues, from memory in one thread.

    Args:
        listener: for clients, non-blocking from here on.
        key: of the session; clients over TCP must prove that they know it. Empty for a Unix socket.
    """

    def __init__(self, listener: socket.socket, key: bytes) -> None:
        self._key = key
        self._is_unix = listener.family == socket.AF_UNIX
        if not self._is_unix and not key:
            raise ValueError("a store that listens on a network needs a key")
        self._values: dict[bytes, bytes] = {}
        self._queues: dict[bytes, collections.deque[bytes]] = {}
        self._waiting: dict[bytes, list[_Client]] = {}  # key -> clients, in order of arrival
        self._unproved: dict[_Client, None] = {}
        self.selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self.selector.register(listener, selectors.EVENT_READ, lambda _: self._accept(listener))

    def serve(self) -> None:
        """Answer requests for as long as the process lives."""
        while True:
            self.turn(None)

    def turn(self, timeout_s: float | None) -> None:
        """Wait for events, and handle them."""
        for key, events in self.selector.select(timeout_s):
            if isinstance(key.data, _Client):
                self._handle(key.data, events)
            else:
                key.data(events)

    def close(self) -> None:
        """Close all connections of clients."""
        for key in list(self.selector.get_map().values()):
            if isinstance(key.data, _Client):
                self._drop(key.data)
        self.selector.close()

    # ---- connections

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError:  # no descriptor is left: close an unauthenticated connection, so that a rank can connect
            if self._unproved:
                self._drop(next(iter(self._unproved)))
            else:
                time.sleep(0.01)
            return
        connection.setblocking(False)
        client = _Client(connection)
        if self._is_unix:
            try:
                unix_sockets.check_user(connection)
            except (unix_sockets.AttachSocketError, OSError):
                connection.close()
                return
            client.has_proved = True
        else:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client.nonce = secrets.token_bytes(protocol.KEY_BYTES)
            if len(self._unproved) >= _MOST_UNPROVED:
                self._drop(next(iter(self._unproved)))
            self._unproved[client] = None
        self.selector.register(connection, selectors.EVENT_READ, client)
        if client.nonce:
            self._send(client, client.nonce)

    def _drop(self, client: _Client) -> None:
        if client.ended:
            return
        client.ended = True
        self._forget_wait(client)
        self._unproved.pop(client, None)
        self.selector.unregister(client.socket)
        client.socket.close()

    def _handle(self, client: _Client, events: int) -> None:
        if client.ended:
            return
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(client)
            if events & selectors.EVENT_READ:
                more = client.socket.recv(_PIECE_BYTES)
                if not more:
                    self._drop(client)
                    return
                client.coming += more
                self._take_messages(client)
        except BlockingIOError:
            pass
        except (OSError, LookupError, TypeError, ValueError):  # the client has ended, or does not follow the protocol
            self._drop(client)

    def _take_messages(self, client: _Client) -> None:
        coming = client.coming
        while len(coming) >= 4 and not client.ended:
            length = protocol.length_of(coming)
            if length > (protocol.MOST_BYTES if client.has_proved else protocol.MOST_BYTES_BEFORE_PROOF):
                raise StoreRefusedError("a message that is longer than any that a client sends")
            if len(coming) < 4 + length:
                return
            rest = bytes(memoryview(coming)[4 : 4 + length])
            del coming[: 4 + length]
            if client.has_proved:
                self._answer(client, protocol.unpack(client.sealing.open(rest)))
            else:
                self._check_proof(client, rest)

    def _check_proof(self, client: _Client, message: bytes) -> None:
        nonces = client.nonce + message[: protocol.KEY_BYTES]
        if not hmac.compare_digest(message[protocol.KEY_BYTES :], protocol.proof_of_client(self._key, nonces)):
            raise StoreRefusedError("a client that does not know the key of the session")
        self._send(client, protocol.proof_of_server(self._key, nonces))
        client.sealing = Sealing(self._key, nonces, is_server=True)
        client.has_proved = True
        self._unproved.pop(client, None)

    def _send(self, client: _Client, body: bytes) -> None:
        was_empty = not client.going
        client.going += client.sealing.seal(body)
        if was_empty:
            self._flush(client)

    def _flush(self, client: _Client) -> None:
        with contextlib.suppress(BlockingIOError):
            sent = client.socket.send(client.going)
            del client.going[:sent]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.going else 0)
        if self.selector.get_key(client.socket).events != events:
            self.selector.modify(client.socket, events, client)

    # ---- requests

    def _answer(self, client: _Client, request: list[bytes]) -> None:
        name, *args = request
        if name in (b"get", b"wait", b"pop"):
            self._await(client, name, args)
            return
        try:
            self._reply(client, *_REQUESTS[name](self, *args))
        except ValueError as error:
            self._send(client, protocol.pack([b"error", str(error).encode()]))

    def _reply(self, client: _Client, *fields: bytes) -> None:
        self._send(client, protocol.pack([b"ok", *fields]))

    def _await(self, client: _Client, name: bytes, keys: list[bytes]) -> None:
        has = self._queues if name == b"pop" else self._values
        missing = [key for key in dict.fromkeys(keys) if key not in has]
        if missing:
            client.waits = name, keys
            for key in missing:
                self._waiting.setdefault(key, []).append(client)
            return
        if name == b"get":
            self._reply(client, *(self._values[key] for key in keys))
        elif name == b"wait":
            self._reply(client)
        else:
            self._reply(client, *self._pop(keys[0]))

    def _came(self, key: bytes) -> None:
        """Answer clients that wait for this key, after a value was set or pushed."""
        for client in self._waiting.pop(key, ()):
            if client.ended or client.waits is None:
                continue
            name, keys = client.waits
            self._forget_wait(client)
            try:
                self._await(client, name, keys)
            except OSError:
                self._drop(client)

    def _forget_wait(self, client: _Client) -> None:
        if client.waits is None:
            return
        for key in client.waits[1]:
            if client in (those := self._waiting.get(key, [])):
                those.remove(client)
                if not those:
                    del self._waiting[key]
        client.waits = None

    def _set(self, *pairs: bytes) -> list[bytes]:
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            self._values[key] = value
        for key in pairs[::2]:
            self._came(key)
        return []

    def _append(self, key: bytes, value: bytes) -> list[bytes]:
        return self._set(key, self._values.get(key, b"") + value)

    def _add(self, key: bytes, amount: bytes) -> list[bytes]:
        try:
            value = str(int(self._values.get(key, b"0")) + int(amount)).encode()
        except ValueError:
            raise ValueError(f"add: the value of key {key.decode()} is not a number") from None
        self._set(key, value)
        return [value]

    def _compare_set(self, key: bytes, expected: bytes, desired: bytes) -> list[bytes]:
        value = self._values.get(key)
        if value == expected or (value is None and not expected):
            self._set(key, desired)
            return [desired]
        return [expected if value is None else value]

    def _check(self, *keys: bytes) -> list[bytes]:
        return [b"yes" if all(key in self._values for key in keys) else b""]

    def _delete(self, key: bytes) -> list[bytes]:
        return [b"" if self._values.pop(key, None) is None else b"yes"]

    def _count(self) -> list[bytes]:
        return [str(len(self._values)).encode()]

    def _keys(self) -> list[bytes]:
        return list(self._values)

    def _push(self, key: bytes, value: bytes) -> list[bytes]:
        self._queues.setdefault(key, collections.deque()).append(value)
        self._came(key)
        return []

    def _pop(self, key: bytes) -> list[bytes]:
        queue = self._queues.get(key)
        if not queue:
            return []
        value = queue.popleft()
        if not queue:
            del self._queues[key]
        return [value]

    def _length(self, key: bytes) -> list[bytes]:
        return [str(len(self._queues.get(key, ()))).encode()]


_REQUESTS: dict[bytes, Callable[..., list[bytes]]] = {
    b"set": Server._set,
    b"append": Server._append,
    b"add": Server._add,
    b"compare_set": Server._compare_set,
    b"check": Server._check,
    b"delete": Server._delete,
    b"count": Server._count,
    b"keys": Server._keys,
    b"push": Server._push,
    b"pop now": Server._pop,
    b"length": Server._length,
}
