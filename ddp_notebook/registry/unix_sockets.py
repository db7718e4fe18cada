"""Unix sockets of processes on this machine: which user is at the other end, and the first messages.

Until both sides are known to be the same user's, only one line with a message of `messages.first_messages` is read.
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
_MOST_BYTES = 64 << 10  # of a line
_LONGEST = 100  # bytes of a path that the system takes for a socket, some less than its limit of 108
_CREDENTIALS = struct.Struct("3i")  # process, user, group


class AttachSocketError(ConnectionError):
    """The other end is another user's, or does not speak as it should."""


class OtherVersionSocketError(AttachSocketError):
    """The other end runs another version of this package."""


def listen(path: Path) -> socket.socket:
    """Listen there, in place of what did before.

    Args:
        path: in a folder of mode 0700.

    Raises:
        OSError: it cannot be made.
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
    """Connect to what listens there.

    Args:
        timeout_s: for this, and for what is then sent and read.

    Raises:
        AttachSocketError: it is another user's.
        OSError: nobody listens.
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
    """Process and user at the other end, as the system knows them.

    Source: unix(7), SO_PEERCRED
    """
    pid, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, user


def check_user(connection: socket.socket) -> None:
    """Make sure that the other end is a process of this user's. The folder keeps others out; this is the second lock.

    Raises:
        AttachSocketError: it is another user's.
    """
    if not hasattr(socket, "SO_PEERCRED"):  # macOS: the folder's mode alone
        return
    pid, user = peer_of(connection)
    if user != os.getuid():
        raise AttachSocketError(f"process {pid} at the other end is of user {user}, not of user {os.getuid()}")


def send_line(connection: socket.socket, message: Message) -> None:
    """Send a message as a line."""
    connection.sendall(to_line(message))


def hear(connection: socket.socket, *kinds: type[M]) -> M:
    """Read a message in a line, and no byte after it.

    Args:
        kinds: the expected kinds of messages, which are checked.

    Raises:
        OtherVersionSocketError: another version of this package is at the other end.
        AttachSocketError: the other end has closed, or has sent something else.
        TimeoutError: nothing came in time.
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
    """A name of this path that is short enough: folders for temporary files may be deep."""
    if len(os.fsencode(path)) <= _LONGEST:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
