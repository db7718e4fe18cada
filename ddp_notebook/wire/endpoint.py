"""One end of the ZeroMQ connection.

A thread owns the sockets, delivers messages in order and detects lost peers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from ddp_notebook.messages import (  # noqa: F401  # registers the message classes that an endpoint decodes
    completion_messages,
    debug_messages,
    faults,
    files,
    mesh_messages,
    outposts,
    ranks,
    resize_messages,
    script_abort,
    survive_messages,
    twice_messages,
    whos_messages,
)
from ddp_notebook.messages.encoding import Message, decode
from ddp_notebook.messages.processes import Address
from ddp_notebook.messages.ranks import Recorded
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import contextlib, functools, logging, threading, time
from ddp_notebook.stdlib import socket as pysocket
from ddp_notebook.wire.keys import Bind, ConnectionFilter, Keyring, on_loopback, unlock
from ddp_notebook.wire.link import BEAT, HEADER_BYTES, RESEND, Header, Link, VersionError

BEAT_S = 1.0  # heartbeat interval of an idle endpoint
SILENT_S = 3.0  # a peer without messages for this long is silent
_ROUND_S = 0.001  # interval of checks for a round of the loop
_BROKEN_S = 0.05  # pause after an error in the loop
_BLOCKED_S = 0.01  # delay before the next try to send to a blocked peer
_GATHER_MS = 5  # batches records that no caller waits for; reading them one by one takes twice as long with 256 ranks
_MANY = 64  # number of peers from which records are batched
_ACK_S = 0.2  # maximum delay of an acknowledgement ...
_ACK_EVERY = 64  # ... and maximum number of messages that one acknowledgement covers

_log = logging.getLogger(__name__)
Receive = Callable[[str, int, Message], None]


class Endpoint:
    """ROUTER socket with many peers (`listen`, in the notebook) or DEALER socket with one peer (`connect`, in a rank).

    `send` is thread-safe. The endpoint's thread calls `receive(peer, epoch, message)` once per message, in the order in
    which the peer sent them, also after a reconnect. `receive` must not block.
    """

    def __init__(self, context: zmq.Context[Any], socket: zmq.Socket[Any], receive: Receive, name: str) -> None:
        self.context = context
        self.doorman: ConnectionFilter | None = None
        self.use: Callable[[Callable[[], Any]], Any] = _call  # wraps calls that need much memory; a rank reserves some
        self.on_tick: Callable[[], float] = lambda: BEAT_S  # called at each tick; returns seconds until the next tick
        self.epoch = 0  # stamped on every message; the owner increments it when the group is formed again
        self._socket = socket
        self._routed = socket.type == zmq.ROUTER
        self._receive = receive
        self._links: dict[bytes, Link] = {}
        self._outbox: deque[tuple[bytes, Sequence[bytes], int]] = deque()
        self._wake_r, self._wake_w = pysocket.socketpair()  # objects: the number of a closed socket may be reused
        self._wake_r.setblocking(False)
        self._wake_w.setblocking(False)
        self._blocked: set[bytes] = set()  # peers whose socket buffer was full at the last try
        self._awake = False
        self._closing = False
        self.rounds = 0  # rounds of the thread's loop; at least one in `BEAT_S`
        self._extra: dict[Any, Callable[[], None]] = {}  # additional sockets that this thread serves
        self._expects_all = False
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)

    # ---- making one

    @classmethod
    def listen(
        cls, keyring: Keyring, receive: Receive, *, bind: Bind = on_loopback, expects_all: bool = False
    ) -> Endpoint:
        """Create the notebook's endpoint with its own ZeroMQ context.

        Args:
            keyring: keys of the processes that may connect.
            receive: called for each message, see the class.
            bind: binds a socket to an address.
            expects_all: accept messages of every peer with a valid key, without a call of `expect`.

        Raises:
            Exception: any error of `bind`.
        """
        context = zmq.Context(io_threads=2)  # the second I/O thread carries bulk data, see `bulk`
        doorman = ConnectionFilter(context, keyring)
        socket = context.socket(zmq.ROUTER)
        _tune(socket)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a peer that reconnects takes over its identity
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to an unknown peer is an error
        keyring.guard(socket)
        try:
            bind(socket)
        except BaseException:
            context.destroy(linger=0)
            raise
        self = cls(context, socket, receive, "ddp-wire")
        self.doorman = doorman
        self._extra[doorman.socket] = doorman.answer
        self._expects_all = expects_all
        return self

    @classmethod
    def connect(cls, address: Address, receive: Receive) -> Endpoint:
        """Create a rank's endpoint, connected to the notebook."""
        context = zmq.Context()
        self = cls(context, dealer(context, address), receive, "ddp-agent")
        self._links[b""] = Link(last_heard_s=time.monotonic())
        return self

    def start(self) -> None:
        self._thread.start()

    @property
    def url(self) -> str:
        """Return the address that this endpoint listens on."""
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def serve(self, socket: zmq.Socket[Any], handle: Callable[[], None]) -> None:
        """Call `handle` in this endpoint's thread whenever `socket` is readable. Call this method before `start`."""
        self._extra[socket] = handle

    # ---- for any thread

    @property
    def has_ended(self) -> bool:
        """Return whether the endpoint's thread died without `close`, so that no messages are sent or received."""
        return not (self._closing or self._thread.is_alive() or self._thread.ident is None)

    def runs(self, timeout_s: float) -> bool:
        """Wake the thread, and return whether it has begun a round of its loop in time."""
        rounds, until = self.rounds, time.monotonic() + timeout_s
        self._wake(force=True)
        while self.rounds == rounds and not self._closing and time.monotonic() < until:
            time.sleep(_ROUND_S)
        return self.rounds != rounds or self._closing

    def send(self, message: Message, peer: str = "") -> None:
        """Send a message. It arrives once and in order, also after a reconnect."""
        self._outbox.append((peer.encode(), message.encode(), self.epoch))
        self._wake()

    def expect(self, peer: str) -> None:
        """Accept messages of this peer. Messages of other peers are dropped even if their key is valid."""
        self._links[peer.encode()] = Link(last_heard_s=time.monotonic())

    def forget(self, peer: str) -> None:
        """Reject further messages of this peer and discard its state."""
        self._links.pop(peer.encode(), None)

    def silent_s(self, peer: str = "") -> float:
        """Return the seconds since the last message of the peer. Above `SILENT_S` the peer counts as silent."""
        link = self._links.get(peer.encode())
        return time.monotonic() - link.last_heard_s if link else float("inf")

    def waiting(self, peer: str = "") -> int:
        """Return the number of messages that the peer has not acknowledged."""
        link = self._links.get(peer.encode())
        return len(self._outbox) + (len(link.unacknowledged) if link else 0)

    def close(self) -> None:
        """Stop the thread and close the sockets. Unsent messages are lost."""
        self._closing = True
        self._wake(force=True)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)

    # ---- the thread

    def _wake(self, force: bool = False) -> None:
        if not self._awake or force:
            try:
                self._awake = True
                self._wake_w.send(b"\0")
            except OSError:  # socket buffer full, or closed
                pass
            except BaseException:  # KeyboardInterrupt: let the next message wake the thread
                self._awake = False
                raise

    def _loop(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        wake = self._wake_r.fileno()
        poller.register(wake, zmq.POLLIN)
        for socket in self._extra:
            poller.register(socket, zmq.POLLIN)
        woken = zmq.Poller()
        woken.register(wake, zmq.POLLIN)
        next_tick = 0.0
        while not self._closing:
            self.rounds += 1
            now = time.monotonic()
            if now >= next_tick:
                try:
                    next_tick = now + self._tick(now)
                except Exception:
                    self._pause()
            try:
                found = poller.poll(max(0, round((next_tick - now) * 1000) + 1))
            except Exception:
                self._pause()
                continue
            for ready, _ in found:
                try:
                    if ready is self._socket:
                        if self._read_all() and len(self._links) >= _MANY:
                            woken.poll(_GATHER_MS)
                    elif ready == wake:
                        self._write_all()
                    else:
                        self._handle_extra(self._extra[ready])
                        continue
                except Exception:
                    self._pause()
                    continue
                soon = _BLOCKED_S if self._blocked else _ACK_S  # an acknowledgement must be sent soon, or is expected
                next_tick = min(next_tick, time.monotonic() + soon)
        for socket in (self._socket, *self._extra):
            socket.close(linger=0)
        self._wake_r.close()
        self._wake_w.close()
        self.context.term()

    def _pause(self) -> None:
        """Pause after an unexpected error in the loop.

        A cell may have replaced a function that pyzmq needs, for example in `builtins`. The thread must survive until
        the cell ends. Messages lost in the meantime are sent again.
        """
        time.sleep(_BROKEN_S)

    def _handle_extra(self, handle: Callable[[], None]) -> None:
        try:
            handle()
        except Exception:  # keep this thread alive, because it serves all messages
            _log.exception("a message on a further socket was lost")

    def _read_all(self) -> bool:
        """Deliver the received messages. Return whether no caller waits for any of them."""
        nobody_waits = True
        for _ in range(200):  # bounded, so that other sockets are served too
            if not int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
                break
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
            peer = frames.pop(0) if self._routed else b""
            link = self._links.get(peer)
            if link is None and self._expects_all:
                link = self._links[peer] = Link(last_heard_s=time.monotonic())
            if link is None:
                continue
            try:
                header = Header.unpack(frames[0])
            except VersionError:
                continue  # stray frame: both sides run the same installation
            now = time.monotonic()
            if link.heard(header, now):
                try:
                    nobody_waits &= self._deliver(peer.decode(), header.epoch, [frames[0][HEADER_BYTES:], *frames[1:]])
                except MemoryError:
                    if link.unhear(now):  # the peer sends the message again
                        raise
                    _log.exception("no memory for a message of %s, which is lost", peer.decode() or "the notebook")
                if link.owes_ack >= _ACK_EVERY:  # not earlier: the peer keeps a message until it is acknowledged
                    self._transmit(peer, link.beat(now))
            elif link.is_gap(header) and link.may_ask(now):
                self._transmit(peer, link.beat(now, RESEND))
            elif header.kind == RESEND:
                self._send_again(peer, link, now)
        return nobody_waits

    def _deliver(self, peer: str, epoch: int, frames: Sequence[bytes]) -> bool:
        """Decode a message and pass it to the handler. Errors of the decoder or the handler are logged.

        Returns:
            Whether no caller waits for the message.

        Raises:
            MemoryError: decoding or handling the message ran out of memory.
        """
        try:
            message = self.use(lambda: decode(frames))
            self._receive(peer, epoch, message)
        except MemoryError:
            raise
        except Exception:
            _log.exception("a message of %s was lost: %.200r", peer or "the notebook", frames)
            return False
        return isinstance(message, Recorded)

    def _write_all(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_r.recv(4096)
        self._awake = False  # reset before reading the outbox, so that a later append wakes the thread again
        now = time.monotonic()
        while self._outbox:
            peer, message, epoch = self._outbox[0]
            link = self._links.get(peer)
            frames = None if link is None else self.use(functools.partial(link.data, message, epoch, now))
            self._outbox.popleft()  # from here on the link holds the message
            if frames is not None and peer not in self._blocked:
                self._transmit(peer, frames)  # a blocked peer gets it later, in order

    def _transmit(self, peer: bytes, frames: Sequence[bytes]) -> bool:
        try:
            self._socket.send_multipart([peer, *frames] if self._routed else frames, zmq.NOBLOCK)
        except (zmq.ZMQError, MemoryError):  # not connected, or no memory: the link sends the frames again
            self._blocked.add(peer)
            return False
        return True

    def _send_again(self, peer: bytes, link: Link, now: float) -> None:
        for frames in link.again(now):
            if not self._transmit(peer, frames):
                return

    def _tick(self, now: float) -> float:
        """Send acknowledgements, retransmissions and heartbeats. Return the seconds until the next tick."""
        pause = min(BEAT_S, self.on_tick())
        if self._outbox:  # a KeyboardInterrupt may have kept the sender from waking this thread
            self._write_all()
        for peer, link in list(self._links.items()):
            if link.unacknowledged:
                pause = _ACK_S
                if peer in self._blocked:
                    pause = _BLOCKED_S
                    self._blocked.discard(peer)
                    self._send_again(peer, link, now)
                elif link.is_overdue(now):
                    self._send_again(peer, link, now)
            if link.owes_ack or now - link.last_sent_s > BEAT_S:
                self._transmit(peer, link.beat(now, BEAT))
        return pause


def _call(function: Callable[[], Any]) -> Any:
    return function()


def dealer(context: zmq.Context[Any], address: Address) -> zmq.Socket[Any]:
    """Return a connected DEALER socket for a rank."""
    socket = context.socket(zmq.DEALER)
    _tune(socket)
    socket.setsockopt(zmq.IDENTITY, address.identity.encode())
    unlock(socket, address)
    socket.connect(address.control)
    return socket


def _tune(socket: zmq.Socket[Any]) -> None:
    """Configure a socket: never drop, never linger, detect a dead connection in `SILENT_S`, reconnect quickly."""
    socket.sndhwm = socket.rcvhwm = 0
    socket.linger = 0
    socket.setsockopt(zmq.IMMEDIATE, 1)  # queue nothing while disconnected; the link keeps unsent messages
    socket.setsockopt(zmq.HEARTBEAT_IVL, round(BEAT_S * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(SILENT_S * 1000))
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
