"""The stream between a notebook and a keeper after their first words (`registry.doors`): messages there and back.

Messages are pickles, each behind its length: both sides run the same version in the same environment.
"""

from __future__ import annotations

import contextlib
import pickle
import socket
import struct
import threading
from typing import Any

_LENGTH = struct.Struct("!Q")


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
