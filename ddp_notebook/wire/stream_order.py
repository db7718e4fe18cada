"""Merge stdout and stderr of a process, which are two pipes, in the order in which it wrote them.

Two pipes do not preserve the order. When Python code in a rank switches from one stream to the other, the rank first
writes a `Change` mark to both pipes (`MarkingWriter`). Text before the mark in one pipe was written before all text
after the mark in the other pipe. So the reader can merge both (`StreamMerge`).
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator, Mapping
from typing import Any

from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import io, itertools, os, threading
from ddp_notebook.wire.marks import CellEnd, Change, MarkReader

_MOST_HELD_BYTES = 1 << 20
_write = io.BufferedWriter.write


class ChangeMarks:
    """Writes marks when the output switches between stdout and stderr.

    Args:
        pipes: pipe for the marks by fd (1 or 2), even if the cell has redirected the fd.
        token: mark token of the session.
    """

    def __init__(self, pipes: Mapping[int, int], token: str) -> None:
        self.fd = 1  # the stream that Python code wrote to last
        self._pipes = pipes
        self._token = token
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()  # reentrant: a signal handler may print while its thread holds the lock
        self._is_off = False
        # A flush takes the text of a stream, and then writes it. Another thread must not write later text in between.
        self.flushing = threading.RLock()
        os.register_at_fork(after_in_child=self._turn_off)

    def to(self, fd: int) -> None:
        """Mark that the next text goes to `fd`, unlike the last text."""
        if self._is_off:
            return
        with self._lock:
            mark = Change(next(self._numbers)).encode(self._token)
            try:
                os.write(self._pipes[3 - fd], mark)
                os.write(self._pipes[fd], mark)
            except OSError:  # the host server has exited
                pass
            self.fd = fd

    def _turn_off(self) -> None:
        """Disable marks in a forked child, because it would reuse the numbers of its parent."""
        self._is_off = True
        self.flushing = threading.RLock()  # a thread of the parent may hold the other one


class MarkingWriter(io.BufferedWriter):
    """Byte buffer of a text stream that writes `Change` marks. The text stream flushes each line."""

    def __init__(self, fd: int, changes: ChangeMarks) -> None:
        super().__init__(io.FileIO(fd, "w", closefd=False), 1 << 16)
        self._fd = fd
        self._changes = changes

    def write(self, data: Any) -> int:
        try:
            if data and self._changes.fd != self._fd:  # an empty write (a flush) needs no mark
                self._changes.to(self._fd)
        finally:  # keep the text even if an interrupt arrives here
            is_written = False
            try:
                with self._changes.flushing:
                    written = _write(self, data)
                    is_written = True
            except KeyboardInterrupt:
                if not is_written:  # it arrived while this thread waited for the lock
                    _write(self, data)
                raise
        return written


def open_stream(name: str, fd: int, changes: ChangeMarks) -> None:
    """Replace `sys.stdout` or `sys.stderr` by a line-buffered stream that marks changes.

    Args:
        name: "stdout" or "stderr".
        fd: file descriptor that the stream writes to.
        changes: mark writer, shared by both streams.
    """
    writer = MarkingWriter(fd, changes)
    stream = io.TextIOWrapper(writer, encoding="utf-8", errors="backslashreplace", line_buffering=True)
    setattr(sys, name, stream)
    setattr(sys, f"__{name}__", stream)


class StreamMerge:
    """Merges the text of both pipes of one process and removes the `Change` marks.

    Text after a mark is held until the other pipe reaches that mark. An interrupt can prevent a rank from writing the
    second mark. So the end of a cell releases all text, because all text of the cell has been read by then.

    Args:
        token: mark token of the session; "" for a process without marks.

    Example:
        >>> merge, mark = StreamMerge("ab12"), Change(1).encode("ab12")
        >>> list(merge.feed(2, mark + b"second"))
        []
        >>> list(merge.feed(1, b"first" + mark))
        [(1, b'first'), (2, b'second')]
    """

    def __init__(self, token: str) -> None:
        self._marks = MarkReader(token) if token else None
        self._held = {1: b"", 2: b""}
        self._changes = {1: 0, 2: 0}  # fd -> number of the last change reached

    def feed(self, fd: int, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Add text of a pipe. Yield `(fd, text)` for text that can be shown."""
        is_plain = not (self._held[1] or self._held[2] or b"\x1e" in data)
        if self._marks is None or is_plain:
            yield fd, data
            return
        self._held[fd] += data
        pending = [fd]
        while pending:
            now = pending.pop()
            before = self._changes[now]
            gives_way = yield from self._free(now)
            if gives_way or self._changes[now] > before:
                pending += [now] * gives_way + [3 - now]
        if self._is_over():
            yield from self.rest()

    def rest(self) -> Iterator[tuple[int, bytes]]:
        """Yield all held text."""
        for fd in (2, 1):
            data, self._held[fd] = self._held[fd], b""
            yield from self._without_changes(fd, data)

    def _free(self, fd: int) -> Generator[tuple[int, bytes], None, bool]:
        """Yield the text of a pipe up to the first change that the other pipe has not reached.

        Held text of fd 2 before a change precedes the text of fd 1 after that change, which may include the end of the
        cell.

        Returns:
            Whether the text of fd 2 has to be yielded first.
        """
        assert self._marks is not None
        data, at, marks_end = self._held[fd], 0, 0
        for start, end, mark in self._marks.find(data):
            marks_end = end
            if not isinstance(mark, Change):
                continue
            if start > at:
                yield fd, data[at:start]
            at = start
            self._changes[fd] = max(self._changes[fd], mark.number)
            if self._changes[3 - fd] < mark.number:
                self._held[fd] = data[at:]
                return False
            if fd == 1 and self._held[2]:
                self._held[fd] = data[end:]
                return True
            at = end
        stop = self._marks.complete_until(data, marks_end)
        if stop > at:
            yield fd, data[at:stop]
        self._held[fd] = data[stop:]
        return False

    def _is_over(self) -> bool:
        """Return whether to release the held text: its cell has ended, or the text is too long."""
        assert self._marks is not None
        if not (self._held[1] or self._held[2]):
            return False
        if len(self._held[1]) + len(self._held[2]) > _MOST_HELD_BYTES:
            return True
        return any(isinstance(mark, CellEnd) for _, _, mark in self._marks.find(self._held[1]))

    def _without_changes(self, fd: int, data: bytes) -> Iterator[tuple[int, bytes]]:
        if self._marks is None or not data:
            return
        at = 0
        for start, end, mark in self._marks.find(data):
            if isinstance(mark, Change):
                self._changes[fd] = max(self._changes[fd], mark.number)
                if start > at:
                    yield fd, data[at:start]
                at = end
        if len(data) > at:
            yield fd, data[at:]
