"""The protocol between the session's store and its clients: requests and replies of byte strings, and who may connect.

| hosts of the session | socket | who may connect |
|---|---|---|
| one | Unix socket | processes of the same user: the kernel reports the peer's user (`SO_PEERCRED`) |
| several | TCP | processes that know the key of the session: both ends prove it, and each message carries a MAC |

torch's `TCPStore` has neither: every user of the machine can list, read and replace its keys. Nothing is pickled here.

    message: length of the rest (4 bytes), MAC (32 bytes, with a key only), fields, each as length (4 bytes) and bytes
"""

from __future__ import annotations

import hmac
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ddp_notebook.stdlib import os, socket, struct

KEY_BYTES = 32
MOST_BYTES = 1 << 30  # of a message
MOST_BYTES_BEFORE_PROOF = 256  # limit of a message from a client that has not yet proved that it knows the key
PROOF_S = 10.0  # for the two messages by which both ends prove that they know the key
_LENGTH = struct.Struct("<I")
_COUNT = struct.Struct("<Q")
_MAC_BYTES = 32
_UNIX = "unix:"


class StoreRefusedError(ConnectionError):
    """The other end is another user's, does not know the key of the session, or has sent an altered message."""


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Address of a store.

    Args:
        at: `unix:NAME`, or `HOST:PORT`.
        key: of the session, in hexadecimal digits; empty for a Unix socket.
    """

    at: str
    key: str = field(default="", repr=False)

    @property
    def is_unix(self) -> bool:
        return self.at.startswith(_UNIX)

    @property
    def secret(self) -> bytes:
        return bytes.fromhex(self.key)

    @property
    def address(self) -> Any:
        """Return the address in the form that `socket.connect` expects."""
        if self.is_unix:
            name = self.at.removeprefix(_UNIX)
            return "\0" + name[1:] if name.startswith("@") else name
        host, _, port = self.at.rpartition(":")
        return host, int(port)

    @property
    def family(self) -> socket.AddressFamily:
        if self.is_unix:
            return socket.AF_UNIX
        return socket.AF_INET6 if ":" in self.address[0] else socket.AF_INET


def listen_here(folder: str) -> tuple[socket.socket, StoreAddress]:
    """Listen at a Unix socket for the processes of this machine.

    On Linux its name is an abstract one: no file that somebody could remove from a folder for temporary files. A
    process of another user can connect to it, is recognized by its user and disconnected before a byte is read.

    Args:
        folder: of mode 0700, for systems without abstract names.

    Returns:
        The listening socket, and its place.
    """
    name = f"ddp_notebook-store-{secrets.token_hex(16)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    at = "@" + name if sys.platform == "linux" else os.path.join(folder, name)
    place = StoreAddress(_UNIX + at)
    listener.bind(place.address)
    listener.listen(socket.SOMAXCONN)
    return listener, place


# ---- messages


def pack(fields: Sequence[bytes]) -> bytes:
    """The body of a message.

    Example:
        >>> unpack(pack([b"set", b"key", b""]))
        [b'set', b'key', b'']
    """
    parts = []
    for one in fields:
        parts.append(_LENGTH.pack(len(one)))
        parts.append(one)
    return b"".join(parts)


def unpack(body: bytes) -> list[bytes]:
    """The fields of a message.

    Raises:
        StoreRefusedError: the body is cut off.
    """
    fields, at = [], 0
    while at < len(body):
        end = at + 4
        if end > len(body):
            raise StoreRefusedError("a message of the store is cut off")
        begin, end = end, end + _LENGTH.unpack_from(body, at)[0]
        if end > len(body):
            raise StoreRefusedError("a message of the store is cut off")
        fields.append(body[begin:end])
        at = end
    return fields


class Sealing:
    """Adds MACs to the messages of one connection and checks those of the other end. Without a key it does nothing.

    A message counts the ones before it, so that none can be repeated, left out or exchanged for another.

    Args:
        key: of the session; empty: none.
        nonces: of both ends, which make the keys of each connection different.
        is_server: which end this is.

    Example:
        >>> here, there = Sealing(b"key", b"nonces", is_server=False), Sealing(b"key", b"nonces", is_server=True)
        >>> there.open(here.seal(b"body")[4:])
        b'body'
        >>> there.open(here.seal(b"body")[4:-1] + b"?")
        Traceback (most recent call last):
        ...
        ddp_notebook.wire.store.StoreRefusedError: a message of the store was altered on its way
    """

    def __init__(self, key: bytes, nonces: bytes, *, is_server: bool) -> None:
        ends = [b"from server", b"from client"]
        if not is_server:
            ends.reverse()
        self._mine, self._other = ([_mac(key, end, nonces) for end in ends]) if key else (b"", b"")
        self._sent = self._received = 0

    def seal(self, body: bytes) -> bytes:
        """The message with this body, as it is sent."""
        if not self._mine:
            return _LENGTH.pack(len(body)) + body
        self._sent += 1
        return _LENGTH.pack(_MAC_BYTES + len(body)) + _mac(self._mine, _COUNT.pack(self._sent), body) + body

    def open(self, rest: bytes) -> bytes:
        """The body of a message that has come.

        Args:
            rest: the message behind its length.

        Raises:
            StoreRefusedError: it is not what the other end has sent.
        """
        if not self._other:
            return rest
        self._received += 1
        body = rest[_MAC_BYTES:]
        if not hmac.compare_digest(rest[:_MAC_BYTES], _mac(self._other, _COUNT.pack(self._received), body)):
            raise StoreRefusedError("a message of the store was altered on its way")
        return body


def length_of(head: bytes | bytearray) -> int:
    """Bytes of a message behind its length, which these 4 bytes are."""
    return int(_LENGTH.unpack_from(head)[0])


# ---- proving the key: nonce of the server, nonce and proof of the client, proof of the server


def proof_of_client(key: bytes, nonces: bytes) -> bytes:
    return _mac(key, b"client", nonces)


def proof_of_server(key: bytes, nonces: bytes) -> bytes:
    return _mac(key, b"server", nonces)


def _mac(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join(parts), "sha256")
