"""Frames on a byte stream of any transport: a socket pair, the standard streams of an ssh, a Unix socket.

frame      length of the body (8 bytes)  kind (1 byte)  body
MESSAGE    number (4 bytes)  count (4 bytes)  sizes (8 bytes each)  frames of the message, see `messages.encoding`
TEXT       process (4 bytes)  fd (1 byte)  bytes that the process wrote to its fd 1 or 2
INPUT      count (4 bytes)  processes (4 bytes each)  bytes for the inboxes of these processes

A request and its reply have the same number. The number 0 means that no reply is expected, or that the message is an
event. Text and input are most of the data of a cell, so they are sent without encoding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ddp_notebook.messages.encoding import Message, decode
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import struct

_FRAME = struct.Struct("!QB")
_MESSAGE = struct.Struct("!II")
_SIZE = struct.Struct("!Q")
_TEXT = struct.Struct("!IB")
_MESSAGE_KIND, _TEXT_KIND, _INPUT_KIND = 0, 1, 2
HEAD_BYTES = _FRAME.size


class Numbered(NamedTuple):
    """Message with the number that a request and its reply share."""

    message: Message
    number: int = 0


class ProcessText(NamedTuple):
    """Bytes that a process wrote to stdout or stderr."""

    process: int
    fd: int
    data: bytes


class Input(NamedTuple):
    """Bytes for the inboxes of processes."""

    processes: tuple[int, ...]
    data: bytes


def pack_message(message: Message, number: int = 0) -> bytes:
    """Return the frame of a message."""
    frames = message.encode()
    sizes = [_SIZE.pack(len(one)) for one in frames]
    body = _MESSAGE.size + sum(map(len, sizes)) + sum(map(len, frames))
    return b"".join((_FRAME.pack(body, _MESSAGE_KIND), _MESSAGE.pack(number, len(frames)), *sizes, *frames))


def pack_text(process: int, fd: int, data: bytes) -> bytes:
    """Return the frame of text from a process."""
    return _FRAME.pack(_TEXT.size + len(data), _TEXT_KIND) + _TEXT.pack(process, fd) + data


def pack_input(processes: Sequence[int], data: bytes) -> bytes:
    """Return the frame of input for processes."""
    to = struct.pack(f"!I{len(processes)}I", len(processes), *processes)
    return _FRAME.pack(len(to) + len(data), _INPUT_KIND) + to + data


def unpack_head(head: bytes | bytearray) -> tuple[int, int]:
    """Return the length of the body and the kind of a frame."""
    length, kind = _FRAME.unpack(head)
    return length, kind


def unpack_body(kind: int, body: bytes | bytearray) -> Numbered | ProcessText | Input:
    """Decode the body of a frame.

    Raises:
        ValueError: the body is not a frame of this version.
    """
    try:
        if kind == _TEXT_KIND:
            process, fd = _TEXT.unpack_from(body)
            return ProcessText(process, fd, bytes(body[_TEXT.size :]))
        if kind == _INPUT_KIND:
            (count,) = struct.unpack_from("!I", body)
            return Input(struct.unpack_from(f"!{count}I", body, 4), bytes(body[4 + 4 * count :]))
        if kind != _MESSAGE_KIND:
            raise ValueError(f"a frame of the kind {kind}")
        number, count = _MESSAGE.unpack_from(body)
        sizes = struct.unpack_from(f"!{count}Q", body, _MESSAGE.size)
    except struct.error as error:
        raise ValueError(f"a frame of {len(body)} bytes is cut: {error}") from error
    at, view, frames = _MESSAGE.size + _SIZE.size * count, memoryview(body), []
    for size in sizes:
        frames.append(view[at : at + size])
        at += size
    if at != len(body):
        raise ValueError(f"the frames of a message have {at} of {len(body)} bytes")
    return Numbered(decode(frames), number)


class Unpacker:
    """Splits a byte stream into frames.

    Example:
        >>> from ddp_notebook.messages.hosts import PingRequest
        >>> unpacker = Unpacker()
        >>> stream = pack_message(PingRequest(), 7) + pack_text(3, 1, b"hello")
        >>> list(unpacker.feed(stream[:9])), list(unpacker.feed(stream[9:]))
        ([], [Numbered(message=PingRequest(), number=7), ProcessText(process=3, fd=1, data=b'hello')])
    """

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Numbered | ProcessText | Input]:
        """Add data of the stream. Yield the frames that are complete now.

        Raises:
            ValueError: invalid frame. The next call continues after it.
        """
        self._buffer += data
        at = 0
        try:
            while len(self._buffer) - at >= HEAD_BYTES:
                size, kind = _FRAME.unpack_from(self._buffer, at)
                if len(self._buffer) - at - HEAD_BYTES < size:
                    break
                body = bytes(self._buffer[at + HEAD_BYTES : at + HEAD_BYTES + size])
                at += HEAD_BYTES + size
                yield unpack_body(kind, body)
        finally:
            del self._buffer[:at]
