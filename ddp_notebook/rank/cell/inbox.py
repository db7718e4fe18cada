"""Where cells come in: a pipe that the main thread reads, one message a line."""

from __future__ import annotations

from collections.abc import Callable

from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import fcntl, logging, os
from ddp_notebook.wire.events import Message, decode

_log = logging.getLogger(__name__)
_READ_BYTES = 1 << 16
_HIGH_FD = 200  # programs may use low numbers


class Inbox:
    """Reads messages from a pipe.

    Args:
        fd: the pipe's read end.
        handle: takes each message, in the reader's thread.
    """

    def __init__(self, fd: int, handle: Callable[[Message], None]) -> None:
        self._fd = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HIGH_FD)
        os.close(fd)
        os.set_blocking(self._fd, False)
        self._handle = handle
        self._line = b""

    def fileno(self) -> int:
        return self._fd

    def read(self) -> bool:
        """Handle what has come. False at the end of the pipe."""
        try:
            data = os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return True
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            try:
                self._handle(decode([line]))
            except Exception:  # the next lines are other messages
                _log.exception("a message was lost: %.200r", line)
        return bool(data)
