"""Merge the text of a process's stdout and stderr in the order in which the process wrote it.

Two pipes alone do not tell it. When Python code in a rank changes from one stream to the other, the rank first puts a
`Change` mark into both pipes. Text before the mark in one pipe was written before all text after it in the other.
"""

from __future__ import annotations

from collections.abc import Iterator

from ddp_notebook.wire.marks import CellEnd, Change, MarkReader

_MOST_HELD_BYTES = 1 << 20


class Merge:
    """The text of one process, without the `Change` marks.

    Text after a mark is held until the other pipe has come to that mark. An interrupt can keep a rank from writing the
    second one. So the end of a cell releases all text, since everything that the cell wrote was read by then.

    Args:
        token: the session's mark token; "" for a process without marks.

    Example:
        >>> merge, mark = Merge("ab12"), Change(1).encode("ab12")
        >>> list(merge.feed(2, mark + b"second"))
        []
        >>> list(merge.feed(1, b"first" + mark))
        [(1, b'first'), (2, b'second')]
    """

    def __init__(self, token: str) -> None:
        self._marks = MarkReader(token) if token else None
        self._held = {1: b"", 2: b""}
        self._changes = {1: 0, 2: 0}  # by fd: the last change that was reached

    def feed(self, fd: int, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Add text of a pipe. Yields `(fd, text)`."""
        is_plain = not (self._held[1] or self._held[2] or b"\x1e" in data)
        if self._marks is None or is_plain:
            yield fd, data
            return
        self._held[fd] += data
        pending = [fd]
        while pending:
            now = pending.pop()
            before = self._changes[now]
            yield from self._free(now)
            if self._changes[now] > before:  # the other pipe may have waited for it
                pending.append(3 - now)
        if self._is_over():
            yield from self.rest()

    def rest(self) -> Iterator[tuple[int, bytes]]:
        """Release the text that is held."""
        for fd in (2, 1):
            data, self._held[fd] = self._held[fd], b""
            yield from self._without_changes(fd, data)

    def _free(self, fd: int) -> Iterator[tuple[int, bytes]]:
        """The text of a pipe up to the first change that the other pipe has not reached."""
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
                return
            at = end
        stop = self._marks.complete_until(data, marks_end)
        if stop > at:
            yield fd, data[at:stop]
        self._held[fd] = data[stop:]

    def _is_over(self) -> bool:
        """Return whether the held text must not wait: its cell has ended, or it is long."""
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
