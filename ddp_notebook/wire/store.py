"""Protocol of the session's store: requests and replies of byte strings, and access control.

| hosts of the session | socket | access |
|---|---|---|
| one | Unix socket | processes of the same user: the kernel reports the peer's user (`SO_PEERCRED`) |
| several | TCP | processes that know the session key: both ends prove it, and each message carries a MAC |

torch's `TCPStore` has no access control: every user of the machine can list, read and replace its keys. This protocol
does not use pickle.

    message: length of the rest (4 bytes), MAC (32 bytes, only with a key), fields, each as length (4 bytes) and bytes
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import hmac, os, secrets, socket, struct

KEY_BYTES = 32
MOST_BYTES = 1 << 30  # maximum size of a message
MOST_BYTES_BEFORE_PROOF = 256  # maximum size of a message from a client that has not proved the key yet
PROOF_S = 10.0  # timeout for the two messages that prove the key
_LENGTH = struct.Struct("<I")
_COUNT = struct.Struct("<Q")
_MAC_BYTES = 32
_UNIX = "unix:"


class StoreRefusedError(ConnectionError):
    """The peer belongs to another user, does not know the session key, or sent an altered message."""


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Address of a store.

    Args:
        at: `unix:NAME` or `HOST:PORT`.
        key: session key in hexadecimal digits; empty for a Unix socket.
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
    """Listen on a Unix socket for the processes of this machine.

    On Linux the socket has an abstract name, so there is no file that a cleanup of temporary files could remove.
    Processes of other users can connect, but they are identified by their user and disconnected before any byte is
    read.

    Args:
        folder: directory with mode 0700, for systems without abstract names.

    Returns:
        The listening socket and its address.
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
    """Return the body of a message with these fields.

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
    """Return the fields of a message body.

    Raises:
        StoreRefusedError: the body is truncated.
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
    """MACs of one connection: added to sent messages, checked in received ones. No effect without a key.

    The MAC covers a message counter, so that messages cannot be repeated, omitted or replaced.

    Args:
        key: session key; empty to disable MACs.
        nonces: nonces of both ends, so that each connection has its own keys.
        is_server: whether this end is the server.

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
        """Return the complete message for a body."""
        if not self._mine:
            return _LENGTH.pack(len(body)) + body
        self._sent += 1
        return _LENGTH.pack(_MAC_BYTES + len(body)) + _mac(self._mine, _COUNT.pack(self._sent), body) + body

    def open(self, rest: bytes) -> bytes:
        """Check a received message and return its body.

        Args:
            rest: message without its length field.

        Raises:
            StoreRefusedError: the MAC is wrong.
        """
        if not self._other:
            return rest
        self._received += 1
        body = rest[_MAC_BYTES:]
        if not hmac.compare_digest(rest[:_MAC_BYTES], _mac(self._other, _COUNT.pack(self._received), body)):
            raise StoreRefusedError("a message of the store was altered on its way")
        return body


def length_of(head: bytes | bytearray) -> int:
    """Return the length of the rest of a message from its first 4 bytes."""
    return int(_LENGTH.unpack_from(head)[0])


# ---- proving the key: nonce of the server, nonce and proof of the client, proof of the server


def proof_of_client(key: bytes, nonces: bytes) -> bytes:
    return _mac(key, b"client", nonces)


def proof_of_server(key: bytes, nonces: bytes) -> bytes:
    return _mac(key, b"server", nonces)


def _mac(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join(parts), "sha256")
