"""The wire for tests: a real endpoint of a notebook and of ranks in this process, and a proxy between them."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace

from ddp_notebook.messages.encoding import Message
from ddp_notebook.messages.processes import Address
from ddp_notebook.messages.ranks import Pull
from ddp_notebook.wire.bulk import BulkFetcher, BulkServer
from ddp_notebook.wire.endpoint import Endpoint
from ddp_notebook.wire.keys import Keyring

LOOPBACK = "127.0.0.1"
_ALL = math.inf


def numbered(count: int, text: str = "") -> list[Pull]:
    """Return messages that differ."""
    return [Pull(request=number, name=text) for number in range(count)]


class Inbox(list[tuple[str, int, Message]]):
    """Received messages of an endpoint, as `(peer, epoch, message)` in the order of arrival."""

    def __init__(self) -> None:
        super().__init__()
        self._came = threading.Condition()

    def receive(self, peer: str, epoch: int, message: Message) -> None:
        with self._came:
            self.append((peer, epoch, message))
            self._came.notify_all()

    def messages(self) -> list[Message]:
        return [message for _, _, message in list(self)]

    def wait_for(self, count: int, timeout_s: float = 5.0) -> list[Message]:
        """Return the messages when there are at least `count`."""
        with self._came:
            self._came.wait_for(lambda: len(self) >= count, timeout_s)
            assert len(self) >= count, f"not within {timeout_s:g} s: {count} messages, {len(self)} came"
            return self.messages()


class Rank:
    """Endpoint of a rank."""

    def __init__(self, address: Address) -> None:
        self.inbox = Inbox()
        self.endpoint = Endpoint.connect(address, self.inbox.receive)
        self.bulk = BulkServer(self.endpoint.context, address)
        self.endpoint.serve(self.bulk.socket, self.bulk.handle)
        self.endpoint.start()


class Wire:
    """Endpoint of a notebook; `join` adds a rank."""

    def __init__(self) -> None:
        self.inbox = Inbox()
        self.keyring = Keyring()
        self.endpoint = Endpoint.listen(self.keyring, self.inbox.receive)
        self.bulk = BulkFetcher(self.endpoint.context, self.keyring)
        self.endpoint.start()
        self._ranks: list[Rank] = []

    def invite(self, peer: str = "local/0") -> Address:
        self.endpoint.expect(peer)
        return self.keyring.invite(peer, control=self.endpoint.url, bulk=self.bulk.url)

    def join(self, peer: str = "local/0", *, through: Proxy | None = None) -> Rank:
        address = self.invite(peer)
        return self.join_at(replace(address, control=through.url) if through else address)

    def join_at(self, address: Address) -> Rank:
        rank = Rank(address)
        self._ranks.append(rank)
        return rank

    def close(self) -> None:
        for rank in self._ranks:
            rank.endpoint.close()
        self.bulk.close()
        self.endpoint.close()
        for end in (self.endpoint, *(rank.endpoint for rank in self._ranks)):
            end.context.destroy(linger=0)  # a failed thread may have left its sockets open


@contextlib.contextmanager
def wire() -> Iterator[Wire]:
    opened = Wire()
    try:
        yield opened
    finally:
        opened.close()


class Proxy:
    """A TCP proxy that can drop data and cut connections.

    Args:
        url: Address to which connections are forwarded.
    """

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server((LOOPBACK, 0))
        self.url = "tcp://{}:{}".format(*self._listener.getsockname())
        self._lock = threading.Lock()
        self._near: list[socket.socket] = []  # sockets to the ranks
        self._far: list[socket.socket] = []  # sockets to the notebook
        self._refuses = self._keeps_far = False
        self._most = {"out": _ALL, "in": _ALL}
        self.passed = {"out": 0, "in": 0}  # bytes; "out" is from the rank to the notebook
        self.swallowed = {"out": 0, "in": 0}
        self.refused = 0  # connections
        self._threads: list[threading.Thread] = []
        self._run(self._accept)

    def swallow(self) -> None:
        """Keep connections open, but drop all data."""
        self._most = {"out": 0.0, "in": 0.0}

    def swallow_after(self, way: str, nbytes: int) -> None:
        """Keep connections open, but drop all data in one direction after `nbytes` bytes."""
        self._most[way] = nbytes

    def cut(self) -> None:
        """End all connections and accept no new one."""
        self._refuses = True
        self._hang_up(self._near)
        self._hang_up(self._far)

    def cut_near(self) -> None:
        """Close the sockets to the ranks only, so that the notebook does not notice it."""
        self._keeps_far = True
        self._hang_up(self._near)

    def mend(self) -> None:
        """Accept new connections and forward their data."""
        self._refuses = False
        self._most = {"out": _ALL, "in": _ALL}

    def close(self) -> None:
        self._refuses = True
        self._hang_up([self._listener])
        self._hang_up(self._near)
        self._hang_up(self._far)
        for thread in self._threads:
            thread.join(timeout=5)
            assert not thread.is_alive()

    def _run(self, work, *arguments) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _hang_up(self, sockets: list[socket.socket]) -> None:
        with self._lock:
            for one in sockets:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)  # wakes the reading thread
                one.close()
            sockets.clear()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                if self._refuses:
                    self.refused += 1
                    near.close()
                    continue
                far = socket.create_connection(self._target)
                self._near.append(near)
                self._far.append(far)
            self._run(self._pump, near, far, "out")
            self._run(self._pump, far, near, "in")

    def _pump(self, source: socket.socket, target: socket.socket, way: str) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if self.passed[way] >= self._most[way]:
                    self.swallowed[way] += len(data)
                else:
                    target.sendall(data)
                    self.passed[way] += len(data)
        if not (self._keeps_far and way == "out"):
            with contextlib.suppress(OSError):
                target.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def proxy(url: str) -> Iterator[Proxy]:
    opened = Proxy(url)
    try:
        yield opened
    finally:
        opened.close()
