"""Text of a rank: pipes behind fd 1 and 2, and marks where the text of a cell ends and where something is displayed.

Python, C, subprocesses and forked children all write to the same pipes, so the order within a pipe is kept, and a line
costs 2 to 3 us (10 to 12 through ipykernel's stream). When Python code changes from stdout to stderr or back, a mark in
both pipes keeps the order between them, which takes two small writes. The mark of a cell's end goes through the pipe of
fd 1. Whoever reads it first passes on what the pipe of fd 2 holds at that moment, so one mark ends the text of both.
Their form is in `wire.marks`.
"""

from __future__ import annotations

import sys
from typing import Any

from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import ctypes, fcntl, os, threading
from ddp_notebook.wire.marks import CellEnd, DisplayMark
from ddp_notebook.wire.stream_order import ChangeMarks, open_stream

_PARTIAL_LINE_S = 0.1  # a line without its end is shown after so long
_HIGH_FD = 200  # out of the way of programs that use low numbers


class Streams:
    """The rank's text. A cell that closes or redirects fd 1 does not take the marks with it."""

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
        self._runs = False  # a cell does
        self._begun = 0  # cells
        self._looks = threading.Event()  # the thread that shows lines without their end does
        threading.Thread(target=self._show_partial_lines, name="ddp-partial-lines", daemon=True).start()

    def begin(self) -> None:
        """A cell begins: from now on a line without its end is shown after a moment."""
        self.put_back()
        self._runs = True
        self._begun += 1
        if not self._looks.is_set():
            self._looks.set()

    def put_back(self) -> None:
        """Open again what a cell has closed, so that the text of the next one is not lost.

        Also when a cell ends: the connections of a group that is formed then would get the free descriptors 0, 1 and 2,
        and putting text there back would break them.
        """
        for fd, kept in self._kept.items():
            try:
                found = os.fstat(fd).st_ino
            except OSError:  # closed
                os.dup2(kept, fd)
                continue
            if found != self._pipes.get(fd, found):
                self.flush()  # text that still waits belongs there
                self._libc.fflush(None)
                os.dup2(kept, fd)
        for name, fd in (("stdout", 1), ("stderr", 2)):
            if not _can_write(getattr(sys, name, None)):
                open_stream(name, fd, self._changes)

    def end(self, cell: int, duration_s: float | None = None) -> None:
        """The text of `cell` ends here; with a duration all of it does."""
        self._runs = False
        self.flush()
        self._libc.fflush(None)
        os.write(self._pipe, CellEnd(cell, duration_s).encode(self._token))

    def mark_place(self, place: int) -> None:
        """Mark the place of that display: here in the text."""
        self.flush()
        if self._changes.fd != 1:
            self._changes.to(1)
        os.write(self._pipe, DisplayMark(place).encode(self._token))

    def flush(self) -> None:
        """Hand Python's buffers to the pipes, also those of streams that a cell has put in place of ours."""
        out, err = self._writers
        now: tuple[Any, Any] = getattr(sys, "stdout", None), getattr(sys, "stderr", None)
        is_ours = now[0] is out and now[1] is err
        for stream in self._writers if is_ours else (*now, out, err):
            try:
                stream.flush()
            except Exception:  # a closed or broken stream of the user's is not our failure
                pass

    def _show_partial_lines(self) -> None:
        """Woken by the first cell of a series alone: by each of them it took a twentieth of `pass` on 64 ranks."""
        pause = threading.Event()
        while True:
            self._looks.wait()
            begun = self._begun
            pause.wait(_PARTIAL_LINE_S)
            if self._runs:
                self.flush()
            elif begun == self._begun:
                self._looks.clear()
                if begun != self._begun:  # by now
                    self._looks.set()


def _can_write(stream: Any) -> bool:
    """Return whether a stream accepts text. A cell may have closed, detached, deleted or replaced it."""
    try:
        stream.write("")
    except Exception:
        return False
    return not getattr(stream, "closed", False)
