"""How a host server and its owner talk: frames on one stream, whatever the way to the host is.

frame      length (4 bytes)  kind (1 byte)  body
COMMAND    JSON: a request, its reply, or an event
TEXT       process (4 bytes)  fd (1 byte)  bytes that the process wrote to its fd 1 or 2
INPUT      count (4 bytes)  processes (4 bytes each)  bytes for their inboxes
DATA       length (4 bytes)  JSON: a request  bytes that go with it
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

_FRAME = struct.Struct("!IB")
_TEXT = struct.Struct("!IB")
_COMMAND_KIND, _TEXT_KIND, _INPUT_KIND, _DATA_KIND = 0, 1, 2, 3

Text = tuple[int, int, bytes]  # process, fd, bytes


class Input(NamedTuple):
    """Bytes for the inboxes of some processes."""

    processes: tuple[int, ...]
    data: bytes


def pack_command(command: dict[str, Any], data: bytes = b"") -> bytes:
    """A frame that holds JSON, and bytes if there are any: the other end finds them in the command, as "data"."""
    body = json.dumps(command).encode()
    if data:
        return b"".join((_FRAME.pack(4 + len(body) + len(data), _DATA_KIND), len(body).to_bytes(4, "big"), body, data))
    return _FRAME.pack(len(body), _COMMAND_KIND) + body


def pack_text(process: int, fd: int, data: bytes) -> bytes:
    """A frame of text from a process."""
    return _FRAME.pack(_TEXT.size + len(data), _TEXT_KIND) + _TEXT.pack(process, fd) + data


def pack_input(processes: Sequence[int], data: bytes) -> bytes:
    """A frame of bytes for the inboxes of processes."""
    to = struct.pack(f"!I{len(processes)}I", len(processes), *processes)
    return _FRAME.pack(len(to) + len(data), _INPUT_KIND) + to + data


class ServerEnd:
    """The server's end of the stream. Neither reading nor writing waits.

    Args:
        incoming: file descriptor of what the owner sends; the object closes it.
        outgoing: and of what is sent to it.
    """

    def __init__(self, incoming: int, outgoing: int) -> None:
        self.incoming, self.outgoing = incoming, outgoing
        self._count = mmap.mmap(-1, 8)  # a process that has forked the server sees it too
        for fd in (incoming, outgoing):
            os.set_blocking(fd, False)

    @classmethod
    def of(cls, connection: socket.socket) -> ServerEnd:
        """The one of a socket, which is the object's now."""
        fd = connection.detach()
        return cls(fd, os.dup(fd))

    @property
    def heard(self) -> int:
        """Bytes that the server has read."""
        return int.from_bytes(self._count[:], "big")

    def read(self, size_bytes: int) -> bytes:
        """What has come. b"": the stream has ended.

        Raises:
            BlockingIOError: nothing has.
            OSError: the stream is cut.
        """
        data = os.read(self.incoming, size_bytes)
        self._count[:] = (self.heard + len(data)).to_bytes(8, "big")
        return data

    def write(self, data: bytes | memoryview) -> int:
        """Send what fits. How many bytes that was. Raises what `read` does."""
        return os.write(self.outgoing, data)

    def close(self) -> None:
        """In a process that is not the server."""
        os.close(self.incoming)
        os.close(self.outgoing)


class Unpacker:
    """Cuts a stream of bytes into frames.

    Example:
        >>> unpacker = Unpacker()
        >>> stream = pack_command({"op": "stop"}) + pack_text(3, 1, b"hello")
        >>> list(unpacker.feed(stream[:9])), list(unpacker.feed(stream[9:]))
        ([], [{'op': 'stop'}, (3, 1, b'hello')])
    """

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[dict[str, Any] | Text | Input]:
        """The frames that are complete now: a dict for a command, `(process, fd, bytes)` for text, or `Input`."""
        self._buffer += data
        at = 0
        try:
            while len(self._buffer) - at >= _FRAME.size:
                size, kind = _FRAME.unpack_from(self._buffer, at)
                if len(self._buffer) - at - _FRAME.size < size:
                    break
                body = bytes(self._buffer[at + _FRAME.size : at + _FRAME.size + size])
                at += _FRAME.size + size
                if kind == _TEXT_KIND:
                    process, fd = _TEXT.unpack_from(body)
                    yield process, fd, body[_TEXT.size :]
                elif kind == _INPUT_KIND:
                    count = int.from_bytes(body[:4], "big")
                    yield Input(struct.unpack_from(f"!{count}I", body, 4), body[4 + 4 * count :])
                elif kind == _DATA_KIND:
                    begin = 4 + int.from_bytes(body[:4], "big")
                    yield {**json.loads(body[4:begin]), "data": body[begin:]}
                else:
                    yield json.loads(body)
        finally:
            del self._buffer[:at]
