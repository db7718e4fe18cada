"""Unix sockets between processes of one user on this machine: check of the peer's user, and first messages.

Only one line with a message of `messages.first_messages` is read before both sides are known to belong to the same
user.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from ddp_notebook.messages.encoding import Message
from ddp_notebook.messages.first_messages import OtherVersionError, from_line, to_line

M = TypeVar("M", bound=Message)
_MOST_BYTES = 64 << 10  # maximum length of a line
_LONGEST = 100  # maximum length of a socket path; somewhat less than the system limit of 108
_CREDENTIALS = struct.Struct("3i")  # process id, user id, group id


class AttachSocketError(ConnectionError):
    """The peer belongs to another user, or violates the protocol."""


class OtherVersionSocketError(AttachSocketError):
    """The peer runs another version of this package."""


def listen(path: Path) -> socket.socket:
    """Listen on a Unix socket. An earlier socket file is replaced.

    Args:
        path: socket path in a folder of mode 0700.

    Raises:
        OSError: the socket cannot be created.
    """
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _short(path) as name:
            listener.bind(name)
        path.chmod(0o600)
        listener.listen(8)
    except BaseException:
        listener.close()
        raise
    return listener


def connect(path: Path, timeout_s: float) -> socket.socket:
    """Connect to a Unix socket.

    Args:
        path: socket path.
        timeout_s: timeout for the connection, and for each later send and receive.

    Raises:
        AttachSocketError: the peer belongs to another user.
        OSError: no process listens on the socket.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        with _short(path) as name:
            connection.connect(name)
        check_user(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return the process id and the user id of the peer, as reported by the kernel.

    Source: unix(7), SO_PEERCRED
    """
    pid, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, user


def check_user(connection: socket.socket) -> None:
    """Check that the peer is a process of this user.

    The mode of the folder is the first protection, this is the second one.

    Raises:
        AttachSocketError: the peer belongs to another user.
    """
    if not hasattr(socket, "SO_PEERCRED"):  # macOS: only the mode of the folder protects the socket
        return
    pid, user = peer_of(connection)
    if user != os.getuid():
        raise AttachSocketError(f"process {pid} at the other end must belong to user {os.getuid()}, got user {user}")


def send_line(connection: socket.socket, message: Message) -> None:
    """Send a message as a line."""
    connection.sendall(to_line(message))


def hear(connection: socket.socket, *kinds: type[M]) -> M:
    """Receive a message as a line, without reading beyond the line.

    Args:
        connection: connected socket.
        kinds: expected message types.

    Raises:
        OtherVersionSocketError: the peer runs another version of this package.
        AttachSocketError: the peer closed the connection or sent something else.
        TimeoutError: no message arrived in time.
    """
    line = bytearray()
    while not line.endswith(b"\n"):
        more = connection.recv(_MOST_BYTES, socket.MSG_PEEK)
        if not more or len(line) > _MOST_BYTES:
            raise AttachSocketError(
                "the other end has closed" if not more else f"more than {_MOST_BYTES} bytes without a line"
            )
        line += connection.recv(more.find(b"\n") + 1 or len(more))
    try:
        return from_line(line, *kinds)
    except OtherVersionError as error:
        raise OtherVersionSocketError(str(error)) from None
    except ValueError as error:
        raise AttachSocketError(str(error)) from None


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """Yield a short form of a socket path, because directories for temporary files may be deep."""
    if len(os.fsencode(path)) <= _LONGEST:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
