"""Text of a rank: pipes behind fd 1 and 2, and marks in them that say which cell the text belongs to.

Python, C, subprocesses and forked children all write to the same pipes, so their order is kept, and a line costs
2 to 3 us (10 to 12 through ipykernel's stream). A cell is done when its mark has come through both.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import sys
import threading

_PARTIAL_LINE_S = 0.1  # a line without its end is shown after so long
_HIGH_FD = 200  # out of the way of programs that use low numbers


def mark(token: str, cell: int, begins: bool) -> bytes:
    """The mark at the begin or end of a cell's text. Shorter than PIPE_BUF, so it is written whole."""
    return f"\x1e{token}{'<' if begins else '>'}{cell}\x1e\n".encode()


class Streams:
    """The rank's own ends of the two pipes. A cell that closes or redirects fd 1 does not take the marks with it."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._pipes = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HIGH_FD) for fd in (1, 2)]
        self._writers = (sys.stdout, sys.stderr)
        self._libc = ctypes.CDLL(None)
        self._in_cell = threading.Event()
        threading.Thread(target=self._show_partial_lines, name="ddp-partial-lines", daemon=True).start()

    def begin(self, cell: int) -> None:
        """Text from here on belongs to `cell`."""
        self.flush()
        self._write(mark(self._token, cell, True))
        self._in_cell.set()

    def end(self, cell: int) -> None:
        """The text of `cell` ends here."""
        self._in_cell.clear()
        self.flush()
        self._libc.fflush(None)
        self._write(mark(self._token, cell, False))

    def flush(self) -> None:
        """Hand Python's buffers to the pipes, also those of streams that a cell has put in place of ours."""
        for stream in {sys.stdout, sys.stderr, *self._writers}:
            with contextlib.suppress(Exception):  # a closed or broken stream of the user's is not our failure
                stream.flush()

    def _write(self, data: bytes) -> None:
        for pipe in self._pipes:
            os.write(pipe, data)

    def _show_partial_lines(self) -> None:
        pause = threading.Event()
        while True:
            self._in_cell.wait()
            pause.wait(_PARTIAL_LINE_S)
            self.flush()
