"""The pipes between a host server and one of its children: the child's output, and its cells.

    fd 1, fd 2    its text
    inbox         cells for a rank: a line each, read by its main thread

Cells use a pipe and not the wire because their latency is visible. The wire takes eight kernel sends per cell, and its
threads compete for the GIL at each of them. It also needs two more threads in each rank. With it, `pass` on four ranks
and two cores took 1.66 times as long as in the notebook itself.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import termios
from collections.abc import Iterator

from ddp_notebook.messages import framing
from ddp_notebook.wire.stream_order import StreamMerge

_PIECE_BYTES = 64 << 10


class TextBuffer:
    """Text in the order in which each process wrote it. Small pieces are joined, since the owner works per piece.

    Example:
        >>> texts = TextBuffer()
        >>> texts.add(0, 1, b"a"); texts.add(1, 1, b"other"); texts.add(0, 1, b"b")
        >>> list(framing.Unpacker().feed(texts.pack()))
        [ProcessText(process=0, fd=1, data=b'ab'), ProcessText(process=1, fd=1, data=b'other')]
        >>> bool(texts)
        False
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._waiting: dict[int, tuple[int, int, bytearray]] = {}  # number -> (process, fd, bytes), oldest first
        self._count = 0  # numbers used so far
        self._last: dict[int, int] = {}  # process -> number of its newest text

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, process: int, fd: int, data: bytes) -> None:
        """Append text of a process."""
        self.nbytes += len(data)
        last = self._waiting.get(self._last.get(process, 0))
        if last is not None and last[1] == fd and len(last[2]) < _PIECE_BYTES:
            last[2].extend(data)
            return
        self._count += 1
        self._last[process] = self._count
        self._waiting[self._count] = process, fd, bytearray(data)

    def pack(self, most_bytes: float = float("inf")) -> bytes:
        """Remove the oldest text, about this many bytes, and return it as frames."""
        frames, nbytes = [], 0
        while self._waiting and nbytes < most_bytes:
            process, fd, data = self._waiting.pop(next(iter(self._waiting)))
            frames.append(framing.pack_text(process, fd, bytes(data)))
            nbytes += len(data)
        self.nbytes -= nbytes
        return b"".join(frames)


_READ_BYTES = 1 << 16


class ChildPipes:
    """Three pipes, made before the child, which gets the far ends. The near ends never block.

    Args:
        inbox: also create the third pipe.
        mark_token: token of the marks in the child's text; "" if there are none.
    """

    def __init__(self, *, inbox: bool, mark_token: str = "") -> None:
        self._merge = StreamMerge(mark_token)
        self._far: list[int] = []  # the child's ends: fd 1, fd 2 and the inbox
        self.outputs: dict[int, int] = {}  # near end -> the child's fd
        self.ended: set[int] = set()  # near ends of closed pipes
        self.inbox: int | None = None  # near end
        self._unsent = bytearray()
        try:
            for fd in (1, 2):
                near, far = os.pipe()
                self.outputs[near] = fd
                self._far.append(far)
            if inbox:
                far, self.inbox = os.pipe()
                self._far.append(far)
        except OSError:  # no descriptor is left
            self.close_near()
            self.close_far()
            raise
        for near in self._near:
            os.set_blocking(near, False)

    @property
    def _near(self) -> list[int]:
        return [*self.outputs, *([] if self.inbox is None else [self.inbox])]

    @property
    def stdout(self) -> int:
        """The child's end of fd 1."""
        return self._far[0]

    @property
    def stderr(self) -> int:
        """The child's end of fd 2."""
        return self._far[1]

    @property
    def inbox_of_child(self) -> int | None:
        return self._far[2] if len(self._far) > 2 else None

    def close_near(self) -> None:
        """Close the near ends in the child and its later siblings."""
        for fd in self._near:
            os.close(fd)

    def close_far(self) -> None:
        """Close the far ends in the server once the child runs: a pipe ends when no process has its far end open."""
        for fd in self._far:
            os.close(fd)
        self._far.clear()

    def read(self, pipe: int) -> Iterator[tuple[int, bytes]]:
        """Yield the content of a pipe as `(fd, bytes)`. Yields nothing if it is empty or closed; a closed pipe enters
        `ended`.

        Earlier text of fd 2 comes first, because only the pipe of fd 1 has the mark of a cell's end. Text from Python
        code in the child keeps its order, see `wire.stream_order`.
        """
        try:
            data = os.read(pipe, _READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self.ended.add(pipe)
            return
        fd = self.outputs[pipe]
        if fd == 1:
            for other in [p for p, its_fd in self.outputs.items() if its_fd == 2]:
                waiting = _bytes_in(other)
                while waiting > 0:
                    yield from self.read(other)
                    waiting -= _READ_BYTES
        yield from self._merge.feed(fd, data)

    def rest(self) -> Iterator[tuple[int, bytes]]:
        """Yield the remaining content of all pipes after the child's end."""
        for pipe in self.outputs:
            while _bytes_in(pipe) > 0:
                yield from self.read(pipe)
        yield from self._merge.rest()

    def close(self, pipe: int) -> None:
        """Close a near end of the child's output."""
        self.ended.discard(pipe)
        del self.outputs[pipe]
        os.close(pipe)

    @property
    def waits(self) -> bool:
        """True if bytes wait for space in the inbox."""
        return bool(self._unsent)

    def put_in_inbox(self, data: bytes) -> bool:
        """Put bytes into the inbox. Returns False if some must wait: call `put_in_inbox(b"")` when the pipe is
        writable.
        """
        self._unsent += data
        with contextlib.suppress(BlockingIOError):
            while self._unsent and self.inbox is not None:
                try:
                    sent = os.write(self.inbox, self._unsent)
                except BrokenPipeError:  # the child has closed it
                    sent = len(self._unsent)
                del self._unsent[:sent]
        return not self._unsent

    def close_inbox(self) -> None:
        if self.inbox is not None:
            os.close(self.inbox)
            self.inbox = None


def _bytes_in(pipe: int) -> int:
    count = array.array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, count)
    return count[0]
