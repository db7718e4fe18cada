"""The server's end of the stream between a host server and its owner."""

from __future__ import annotations

import mmap
import os
import socket


class ServerEnd:
    """The server's end of the stream. Neither reads nor writes block.

    Args:
        incoming: file descriptor to read from; the object closes it.
        outgoing: file descriptor to write to; the object closes it.
    """

    def __init__(self, incoming: int, outgoing: int) -> None:
        self.incoming, self.outgoing = incoming, outgoing
        self._count = mmap.mmap(-1, 8)  # shared with the process that has forked the server
        for fd in (incoming, outgoing):
            os.set_blocking(fd, False)

    @classmethod
    def of(cls, connection: socket.socket) -> ServerEnd:
        """Return the server's end for a socket, which then belongs to the object."""
        fd = connection.detach()
        return cls(fd, os.dup(fd))

    @property
    def heard(self) -> int:
        """Bytes that the server has read."""
        return int.from_bytes(self._count[:], "big")

    def read(self, size_bytes: int) -> bytes:
        """Return the bytes that have arrived; b"" if the stream has ended.

        Raises:
            BlockingIOError: no bytes have arrived.
            OSError: the connection is broken.
        """
        data = os.read(self.incoming, size_bytes)
        self._count[:] = (self.heard + len(data)).to_bytes(8, "big")
        return data

    def write(self, data: bytes | memoryview) -> int:
        """Send the bytes that fit, and return their number. Raises the errors of `read`."""
        return os.write(self.outgoing, data)

    def close(self) -> None:
        """Close the descriptors in a process that is not the server."""
        os.close(self.incoming)
        os.close(self.outgoing)
