"""The stream between a notebook and a keeper after their first words (`registry.doors`): messages there and back.

Messages are pickles, each behind its length: both sides run the same version in the same environment.
"""

from __future__ import annotations

import contextlib
import pickle
import socket
import struct
from collections.abc import Callable
from typing import Any

from ddp_notebook.launch.outbox import Outbox

_LENGTH = struct.Struct("!Q")


class Channel:
    """Messages there and back, after the first words.

    Args:
        stream: to the other side.
    """

    def __init__(self, stream: socket.socket) -> None:
        stream.settimeout(None)
        self._stream = stream
        self._outbox = Outbox(stream)

    def send(self, *message: Any) -> None:
        """Send a message. From any thread. Does not wait: the other side may be stopped.

        Raises:
            OSError: the other side is gone.
        """
        data = pickle.dumps(message, protocol=5)
        self._outbox.send(_LENGTH.pack(len(data)) + data)

    def receive(self, on_bytes: Callable[[], object] = lambda: None) -> tuple[Any, ...] | None:
        """Wait for the next message. None: the other side is gone.

        Args:
            on_bytes: called whenever a part of it has come.
        """
        try:
            (nbytes,) = _LENGTH.unpack(self._take(_LENGTH.size, on_bytes))
            message: tuple[Any, ...] = pickle.loads(self._take(nbytes, on_bytes))
        except OSError:
            return None
        return message

    def _take(self, nbytes: int, on_bytes: Callable[[], object]) -> bytearray:
        data = bytearray(nbytes)
        at = 0
        while at < nbytes:
            if not (read := self._stream.recv_into(memoryview(data)[at:])):
                raise ConnectionResetError("the other side is gone")
            at += read
            on_bytes()
        return data

    def close(self) -> None:
        """End the stream: whoever waits for a message gets None."""
        with contextlib.suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)
        self._stream.close()
