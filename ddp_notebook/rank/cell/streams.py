"""Text of a rank: pipes behind fd 1 and 2, with marks for the end of a cell and for displays.

Python, C, subprocesses and forked children write to the same pipes, so the order within a pipe is preserved. A line
takes 2 to 3 us (10 to 12 us with ipykernel's stream). When Python code switches between stdout and stderr, a mark in
both pipes preserves the order between them. The mark for the end of a cell goes to the pipe of fd 1. Its reader first
reads all available text of fd 2, so one mark ends the text of both pipes. The format of marks is in `wire.marks`.
"""

from __future__ import annotations

import sys
from typing import Any

from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import ctypes, fcntl, os, threading
from ddp_notebook.wire.marks import CellEnd, DisplayMark
from ddp_notebook.wire.stream_order import ChangeMarks, open_stream

_PARTIAL_LINE_S = 0.1  # an incomplete line is shown after this time
_HIGH_FD = 200  # high, because programs may use low numbers


class Streams:
    """Output streams of the rank. The marks reach the pipe even if a cell closes or redirects fd 1."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._kept = {fd: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HIGH_FD) for fd in (0, 1, 2)}
        self._pipe = self._kept[1]
        self._changes = ChangeMarks(self._kept, token)
        self._pipes = {fd: os.fstat(fd).st_ino for fd in (1, 2)}  # a cell may redirect stdin
        for name, fd in (("stdout", 1), ("stderr", 2)):
            getattr(sys, name).flush()
            open_stream(name, fd, self._changes)
        self._writers = (sys.stdout, sys.stderr)
        self._libc = ctypes.CDLL(None)
        self._runs = False  # True while a cell runs
        self._begun = 0  # number of started cells
        self._looks = threading.Event()  # the thread that shows incomplete lines is active
        threading.Thread(target=self._show_partial_lines, name="ddp-partial-lines", daemon=True).start()

    def begin(self) -> None:
        """Start a cell. From now on incomplete lines are shown after `_PARTIAL_LINE_S`."""
        self.put_back()
        self._runs = True
        self._begun += 1
        if not self._looks.is_set():
            self._looks.set()

    def put_back(self) -> None:
        """Reopen descriptors and streams that a cell has closed, so that later text is not lost.

        This is also done at the end of a cell. Otherwise connections of a new group could get the free descriptors 0, 1
        and 2, and restoring the streams would break these connections.
        """
        for fd, kept in self._kept.items():
            try:
                found = os.fstat(fd).st_ino
            except OSError:  # closed
                os.dup2(kept, fd)
                continue
            if found != self._pipes.get(fd, found):
                self.flush()  # buffered text belongs to the redirected descriptor
                self._libc.fflush(None)
                os.dup2(kept, fd)
        for name, fd in (("stdout", 1), ("stderr", 2)):
            if not _can_write(getattr(sys, name, None)):
                open_stream(name, fd, self._changes)

    def end(self, cell: int, duration_s: float | None = None) -> None:
        """End the text of `cell`. With a duration, the mark also reports that the cell succeeded."""
        self._runs = False
        self.flush()
        self._libc.fflush(None)
        os.write(self._pipe, CellEnd(cell, duration_s).encode(self._token))

    def mark_place(self, place: int) -> None:
        """Write the mark of a display at the current position of the text."""
        self.flush()
        if self._changes.fd != 1:
            self._changes.to(1)
        os.write(self._pipe, DisplayMark(place).encode(self._token))

    def flush(self) -> None:
        """Flush the output buffers of Python, including those of streams that a cell has installed."""
        out, err = self._writers
        now: tuple[Any, Any] = getattr(sys, "stdout", None), getattr(sys, "stderr", None)
        is_ours = now[0] is out and now[1] is err
        for stream in self._writers if is_ours else (*now, out, err):
            try:
                if stream is out or stream is err:
                    with self._changes.flushing:
                        stream.flush()
                else:
                    stream.flush()
            except BaseException:  # a closed or broken stream of the user; it may raise KeyboardInterrupt
                pass

    def _show_partial_lines(self) -> None:
        """Flush incomplete lines while cells run.

        Only the first of a series of cells wakes this thread. Waking it for each cell took 5 % of the time of `pass`
        with 64 ranks.
        """
        pause = threading.Event()
        while True:
            self._looks.wait()
            begun = self._begun
            pause.wait(_PARTIAL_LINE_S)
            if self._runs:
                self.flush()
            elif begun == self._begun:
                self._looks.clear()
                if begun != self._begun:  # a cell has started in the meantime
                    self._looks.set()


def _can_write(stream: Any) -> bool:
    """Return whether a stream accepts text. A cell may have closed, detached, deleted or replaced it or its methods."""
    try:
        stream.write("")
        stream.flush()
        return not getattr(stream, "closed", False)
    except BaseException:  # including KeyboardInterrupt and SystemExit: neither may end the rank
        return False
