"""Pipe from which the main thread reads cells, one message per line."""

from __future__ import annotations

from collections.abc import Callable

from ddp_notebook.messages.encoding import Message, decode
from ddp_notebook.rank import reserve
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import contextlib, fcntl, logging, os, time

_log = logging.getLogger(__name__)
_READ_BYTES = 1 << 16
_HIGH_FD = 200  # high, because programs may use low numbers
_PATIENCE_S = 3.0  # maximum time without memory for a message, including the reserve
_HEAD_BYTES = 200


class Inbox:
    """Reads messages from a pipe.

    Args:
        fd: read end of the pipe.
        handle: called with each message, in the reader's thread.
        on_lost: called with the first bytes of a message that could not be handled, and the exception.
    """

    def __init__(self, fd: int, handle: Callable[[Message], None], on_lost: Callable[[bytes, Exception], None]) -> None:
        self._fd = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HIGH_FD)
        os.close(fd)
        os.set_blocking(self._fd, False)
        self._handle = handle
        self._on_lost = on_lost
        self._buffer = bytearray(_READ_BYTES)  # allocated early, while memory is available
        self._line = bytearray()
        self._is_losing = False  # the current incomplete message is lost

    def fileno(self) -> int:
        return self._fd

    def read(self) -> bool:
        """Handle the available messages. Return False at the end of the pipe."""
        try:
            count = os.readv(self._fd, [self._buffer])
        except BlockingIOError:
            return True
        begin = 0
        while begin < count:
            end = self._buffer.find(b"\n", begin, count)
            self._append(begin, count if end < 0 else end)
            if end < 0:
                break
            begin = end + 1
            self._end_line()
        return count > 0

    def _append(self, begin: int, end: int) -> None:
        """Append bytes of the buffer to the current message."""
        if self._is_losing:
            return
        try:
            reserve.use_patiently(lambda: self._extend(begin, end), time.monotonic() + _PATIENCE_S)
        except MemoryError as error:
            self._lose(bytes(self._line[:_HEAD_BYTES] or self._buffer[begin : begin + _HEAD_BYTES]), error)
            self._is_losing, self._line = True, bytearray()

    def _extend(self, begin: int, end: int) -> None:
        with memoryview(self._buffer) as view, view[begin:end] as piece:
            self._line += piece

    def _end_line(self) -> None:
        line, self._line = self._line, bytearray()
        if self._is_losing:
            self._is_losing = False
            return
        try:
            self._handle(reserve.use_patiently(lambda: decode([line]), time.monotonic() + _PATIENCE_S))
        except Exception as error:  # the next lines are separate messages
            self._lose(bytes(line[:_HEAD_BYTES]), error)

    def _lose(self, head: bytes, error: Exception) -> None:
        if not isinstance(error, MemoryError):
            with contextlib.suppress(Exception):  # a cell has replaced a function of `logging`
                _log.error("a message was lost: %.200r", head, exc_info=error)
        reserve.use_patiently(lambda: self._on_lost(head, error))
