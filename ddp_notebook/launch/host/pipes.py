"""The pipes between a host server and one of its children: what the child writes, and what it is told.

    fd 1, fd 2    its text
    inbox         cells, for a rank: a line each, read by its main thread

A cell goes in here and not by the wire, since it is on the path that everybody feels: the wire takes eight sends in a
kernel whose threads take the interpreter from each other at each of them, and two more threads in each rank. `pass` on
four ranks of two cores took 1.66 times a local one that way.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import termios
from collections.abc import Iterator

_READ_BYTES = 1 << 16


class Pipes:
    """Made before the child, which gets the far ends; this side never blocks."""

    def __init__(self, *, inbox: bool) -> None:
        self._far: list[int] = []  # the child's ends: of its fd 1, its fd 2 and its inbox
        self.outputs: dict[int, int] = {}  # our end -> the child's fd
        self.ended: set[int] = set()  # those of them that nothing comes from any more
        self.inbox: int | None = None  # our end
        self._unsent = bytearray()
        for fd in (1, 2):
            near, far = os.pipe()
            self.outputs[near] = fd
            self._far.append(far)
        if inbox:
            far, self.inbox = os.pipe()
            self._far.append(far)
        for near in self._near:
            os.set_blocking(near, False)

    @property
    def _near(self) -> list[int]:
        return [*self.outputs, *([] if self.inbox is None else [self.inbox])]

    @property
    def stdout(self) -> int:
        """The child's end of its fd 1."""
        return self._far[0]

    @property
    def stderr(self) -> int:
        """The child's end of its fd 2."""
        return self._far[1]

    @property
    def inbox_of_child(self) -> int | None:
        return self._far[2] if len(self._far) > 2 else None

    def close_near(self) -> None:
        """In the child, and in its later siblings: this side is the server's."""
        for fd in self._near:
            os.close(fd)

    def close_far(self) -> None:
        """In the server, once the child exists: so that its end is seen."""
        for fd in self._far:
            os.close(fd)
        self._far.clear()

    def read(self, pipe: int) -> Iterator[tuple[int, bytes]]:
        """What a pipe holds, as `(fd, bytes)`: nothing when it is empty, or at its end and now in `ended`.

        What was written to fd 2 before it goes first: the end of a cell is marked in the pipe of fd 1 alone.
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
        yield fd, data

    def close(self, pipe: int) -> None:
        """Close one of our ends of the child's output."""
        self.ended.discard(pipe)
        del self.outputs[pipe]
        os.close(pipe)

    def tell(self, data: bytes) -> bool:
        """Put bytes into the inbox. Whether all went: else `tell(b"")` when it can take more."""
        self._unsent += data
        with contextlib.suppress(BlockingIOError):
            while self._unsent and self.inbox is not None:
                try:
                    sent = os.write(self.inbox, self._unsent)
                except BrokenPipeError:  # the child ends
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
