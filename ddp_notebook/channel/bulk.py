"""Large data, in pieces, on sockets of its own: nothing on the control socket ever waits behind it.

The receiver fetches. It asks for a few pieces at a time and asks again for what did not come, so a slow reader is
never flooded and a cut connection costs a repeated piece. On the notebook's side the sockets of this module are
served by the Context's second I/O thread (a small message sent behind 200 MB waited 0.85 to 1.2 s otherwise;
measured on two cores).

    fetcher -> server   GET   transfer, offset
    server -> fetcher   PIECE transfer, offset, bytes
    fetcher -> server   DROP  transfer
"""

from __future__ import annotations

import itertools
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq

from ddp_notebook.channel.keys import Address, Keyring, unlock

PIECE_BYTES = 1 << 20
_WINDOW = 4  # pieces on their way
_RETRY_S = 2.0
_HEADER = struct.Struct("!cQQ")
_GET, _PIECE, _DROP = b"G", b"P", b"D"
_SECOND_IO_THREAD = 0b10


class BulkServer:
    """A rank's side: holds what is to be fetched. `handle` is called by the endpoint's thread."""

    def __init__(self, context: zmq.Context[Any], address: Address) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.setsockopt(zmq.IDENTITY, address.identity.encode())
        unlock(self.socket, address)
        self.socket.connect(address.bulk)
        self._numbers = itertools.count(1)
        self._held: dict[int, memoryview] = {}

    def hold(self, data: bytes) -> int:
        """Keep `data` until it was fetched, in place of what was kept before: a notebook fetches one value at a time.
        Returns the number of the transfer."""
        transfer = next(self._numbers)
        self._held = {transfer: memoryview(data)}
        return transfer

    def handle(self) -> None:
        """Answer one request."""
        kind, transfer, offset = _HEADER.unpack(self.socket.recv())
        if kind == _DROP:
            self._held.pop(transfer, None)
        elif transfer in self._held:
            piece = self._held[transfer][offset : offset + PIECE_BYTES]
            self.socket.send_multipart([_HEADER.pack(_PIECE, transfer, offset), piece])


class BulkFetcher:
    """The notebook's side. Fetches run in the caller's thread, one after the other."""

    def __init__(self, context: zmq.Context[Any], keyring: Keyring, *, host: str = "127.0.0.1") -> None:
        self._socket = context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.setsockopt(zmq.AFFINITY, _SECOND_IO_THREAD)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        keyring.guard(self._socket)
        self._socket.bind(f"tcp://{host}:*")
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """Where ranks connect to."""
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def fetch(self, peer: str, transfer: int, nbytes: int, check: Callable[[], None] = lambda: None) -> bytearray:
        """Fetch `nbytes` of a transfer.

        Args:
            peer: identity of the process that holds it.
            transfer: the number that its `BulkServer.hold` returned.
            nbytes: its size.
            check: called several times a second; raises to give up (the peer died, the user interrupted).
        """
        data = bytearray(nbytes)
        identity = peer.encode()
        missing = list(range(0, nbytes, PIECE_BYTES))[::-1]
        asked: dict[int, float] = {}  # offset -> when
        with self._lock:
            try:
                while missing or asked:
                    now = time.monotonic()
                    overdue = [offset for offset, when in asked.items() if now - when > _RETRY_S]
                    while missing and len(asked) < _WINDOW:
                        overdue.append(missing.pop())
                    for offset in overdue:
                        asked[offset] = now
                        self._socket.send_multipart([identity, _HEADER.pack(_GET, transfer, offset)])
                    check()
                    if not self._socket.poll(100):
                        continue
                    sender, header, *piece = self._socket.recv_multipart()
                    kind, number, offset = _HEADER.unpack(header)
                    if sender == identity and kind == _PIECE and number == transfer and asked.pop(offset, None):
                        data[offset : offset + len(piece[0])] = piece[0]
            finally:
                self._drop(identity, transfer)
        return data

    def drop(self, peer: str, transfer: int) -> None:
        """Let a peer forget a transfer that is not fetched."""
        with self._lock:
            self._drop(peer.encode(), transfer)

    def _drop(self, identity: bytes, transfer: int) -> None:
        self._socket.send_multipart([identity, _HEADER.pack(_DROP, transfer, 0)])

    def close(self) -> None:
        """Close the socket. Before the endpoint is closed, whose Context it shares."""
        with self._lock:
            self._socket.close(linger=0)
