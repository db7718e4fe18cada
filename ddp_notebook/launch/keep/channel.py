"""The stream between a notebook and a keeper, after their first messages (`registry.unix_sockets`)."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable

from ddp_notebook.launch.outbox import Outbox
from ddp_notebook.messages import keeper, ranks  # noqa: F401  # both sides read all of them
from ddp_notebook.messages.encoding import Message
from ddp_notebook.messages.framing import (
    HEAD_BYTES,
    Numbered,
    ProcessText,
    pack_message,
    pack_text,
    unpack_body,
    unpack_head,
)


class Channel:
    """Sends and receives messages.

    Args:
        stream: to the other side.
    """

    def __init__(self, stream: socket.socket) -> None:
        stream.settimeout(None)
        self._stream = stream
        self._outbox = Outbox(stream)

    def send(self, message: Message | ProcessText, number: int = 0) -> None:
        """Send a message, or text of a rank. From any thread. Does not block, because the other side may be stopped.

        Args:
            message: to send.
            number: of the request, or of the request that this answers.

        Raises:
            OSError: the other side has closed the stream.
        """
        self._outbox.send(pack_text(*message) if isinstance(message, ProcessText) else pack_message(message, number))

    def receive(self, on_bytes: Callable[[], object] = lambda: None) -> Numbered | ProcessText | None:
        """Wait for the next message. Returns None if the other side has closed the stream, or sent invalid data.

        Args:
            on_bytes: called whenever a part of the message has arrived.
        """
        try:
            nbytes, kind = unpack_head(self._receive(HEAD_BYTES, on_bytes))
            came = unpack_body(kind, self._receive(nbytes, on_bytes))
        except (OSError, ValueError):
            return None
        return came if isinstance(came, Numbered | ProcessText) else None

    def _receive(self, nbytes: int, on_bytes: Callable[[], object]) -> bytearray:
        data = bytearray(nbytes)
        at = 0
        while at < nbytes:
            if not (read := self._stream.recv_into(memoryview(data)[at:])):
                raise ConnectionResetError("the peer closed the connection")
            at += read
            on_bytes()
        return data

    def close(self) -> None:
        """End the stream. A pending `receive` returns None."""
        with contextlib.suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)
        self._stream.close()
