"""Non-blocking sends on a stream socket, so that a stopped or hanging peer cannot block the sender."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections import deque


class Outbox:
    """Sends bytes in order. A thread sends the bytes that the socket does not accept at once.

    Args:
        stream: a connected socket, in blocking mode. The caller closes it.

    Example:
        >>> near, far = socket.socketpair()
        >>> outbox = Outbox(near)
        >>> outbox.send(bytes(10_000_000))  # the other end does not read yet
        >>> sum(len(far.recv(1 << 20)) for _ in range(5)) > 0
        True
        >>> near.close(), far.close()
        (None, None)
    """

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._waiting: deque[memoryview] = deque()

    def send(self, data: bytes | bytearray) -> None:
        """Send all data, now or later. From any thread.

        Raises:
            OSError: the stream has ended.
        """
        with self._lock:
            left = memoryview(data)
            if not self._waiting:
                left = self._send_now(left)
            if left:
                self._waiting.append(left)
                if len(self._waiting) == 1:
                    threading.Thread(target=self._send_later, name="ddp-outbox", daemon=True).start()

    def _send_now(self, data: memoryview) -> memoryview:
        """Return the bytes that the socket has not accepted."""
        with contextlib.suppress(BlockingIOError):
            while data:
                data = data[self._stream.send(data, socket.MSG_DONTWAIT) :]
        return data

    def _send_later(self) -> None:
        try:
            is_writable = select.poll()
            is_writable.register(self._stream, select.POLLOUT)
            while True:
                is_writable.poll()
                with self._lock:
                    self._waiting[0] = self._send_now(self._waiting[0])
                    if not self._waiting[0]:
                        self._waiting.popleft()
                    if not self._waiting:
                        return
        except (OSError, ValueError):  # the stream was closed; the next `send` reports it
            with self._lock:
                self._waiting.clear()
