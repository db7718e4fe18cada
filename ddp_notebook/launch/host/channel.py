"""The server's end of the stream between a host server and its owner."""

from __future__ import annotations

import mmap
import os
import socket


class ServerEnd:
    """The server's end of the stream. Neither reading nor writing waits.

    Args:
        incoming: file descriptor of what the owner sends; the object closes it.
        outgoing: and of what is sent to it.
    """

    def __init__(self, incoming: int, outgoing: int) -> None:
        self.incoming, self.outgoing = incoming, outgoing
        self._count = mmap.mmap(-1, 8)  # a process that has forked the server sees it too
        for fd in (incoming, outgoing):
            os.set_blocking(fd, False)

    @classmethod
    def of(cls, connection: socket.socket) -> ServerEnd:
        """The one of a socket, which is the object's now."""
        fd = connection.detach()
        return cls(fd, os.dup(fd))

    @property
    def heard(self) -> int:
        """Bytes that the server has read."""
        return int.from_bytes(self._count[:], "big")

    def read(self, size_bytes: int) -> bytes:
        """What has come. b"": the stream has ended.

        Raises:
            BlockingIOError: nothing has.
            OSError: the stream is cut.
        """
        data = os.read(self.incoming, size_bytes)
        self._count[:] = (self.heard + len(data)).to_bytes(8, "big")
        return data

    def write(self, data: bytes | memoryview) -> int:
        """Send what fits. How many bytes that was. Raises what `read` does."""
        return os.write(self.outgoing, data)

    def close(self) -> None:
        """In a process that is not the server."""
        os.close(self.incoming)
        os.close(self.outgoing)
