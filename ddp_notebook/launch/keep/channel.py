"""The stream between a notebook and a keeper, a Unix socket: first who is there, then messages.

The first word of either side is a line of JSON; until both are known to be the same user's nothing else is read. Then
messages are pickles, each behind its length: both sides run the same version in the same environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import socket
import struct
import threading
from typing import Any

from ddp_notebook.errors import UsageError

_LENGTH = struct.Struct("!Q")
_PEER = struct.Struct("3i")  # struct ucred: pid, uid, gid
_FIRST_WORD_S = 5.0
_FIRST_WORD_BYTES = 1 << 22


def peer_of(stream: socket.socket) -> tuple[int, int]:
    """Process and user at the other end of a Unix socket, as the system knows them.

    Source: unix(7), SO_PEERCRED
    """
    pid, uid, _ = _PEER.unpack(stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, uid


def is_same_user(stream: socket.socket) -> bool:
    """Whether the other end is a process of this process's user."""
    return peer_of(stream)[1] == os.getuid()


def connect(path: str) -> socket.socket:
    """A stream to who listens there.

    Raises:
        UsageError: nobody does, or another user.
    """
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        stream.settimeout(_FIRST_WORD_S)
        stream.connect(path)
    except OSError as error:
        stream.close()
        raise UsageError(f"nobody answers at {path} ({error.strerror}): the session has ended") from error
    if not is_same_user(stream):
        stream.close()
        raise UsageError(f"who listens at {path} is another user's process")
    return stream


def say(stream: socket.socket, **words: Any) -> None:
    """Say a first word."""
    stream.settimeout(_FIRST_WORD_S)
    stream.sendall(json.dumps(words).encode() + b"\n")


def hear(stream: socket.socket, timeout_s: float = _FIRST_WORD_S) -> dict[str, Any]:
    """The first word of the other side.

    Raises:
        OSError, ValueError: none has come.
    """
    stream.settimeout(timeout_s)
    data = bytearray()
    while not data.endswith(b"\n"):  # not a byte of what comes behind it
        more = stream.recv(1 << 16, socket.MSG_PEEK)
        if not more or len(data) > _FIRST_WORD_BYTES:
            raise ValueError("the other side has said nothing")
        data += stream.recv(more.find(b"\n") + 1 or len(more))
    words = json.loads(data)
    if not isinstance(words, dict):
        raise ValueError("the other side speaks something else")
    return words


class Channel:
    """Messages there and back, after the first words.

    Args:
        stream: to the other side.
    """

    def __init__(self, stream: socket.socket) -> None:
        stream.settimeout(None)
        self._stream = stream
        self._lock = threading.Lock()

    def send(self, *message: Any) -> None:
        """Send a message. From any thread.

        Raises:
            OSError: the other side is gone.
        """
        data = pickle.dumps(message, protocol=5)
        with self._lock:
            self._stream.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> tuple[Any, ...] | None:
        """Wait for the next message. None: the other side is gone."""
        try:
            (nbytes,) = _LENGTH.unpack(self._take(_LENGTH.size))
            message: tuple[Any, ...] = pickle.loads(self._take(nbytes))
        except OSError:
            return None
        return message

    def _take(self, nbytes: int) -> bytearray:
        data = bytearray(nbytes)
        at = 0
        while at < nbytes:
            if not (read := self._stream.recv_into(memoryview(data)[at:])):
                raise ConnectionResetError("the other side is gone")
            at += read
        return data

    def close(self) -> None:
        """End the stream: whoever waits for a message gets None."""
        with contextlib.suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)
        self._stream.close()
