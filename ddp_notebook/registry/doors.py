"""Unix sockets at which what runs on this machine is spoken to: who is at the other end, and lines of JSON."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_MOST_BYTES = 64 << 10  # of a line
_LONGEST = 100  # bytes of a path that the system takes for a socket, some less than its limit of 108
_CREDENTIALS = struct.Struct("3i")  # process, user, group


class DoorError(ConnectionError):
    """The other end is another user's, or does not speak as it should."""


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
        DoorError: it is another user's.
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


def check_user(connection: socket.socket) -> None:
    """Make sure that the other end is a process of this user's. The folder keeps others out; this is the second lock.

    Raises:
        DoorError: it is another user's.
    """
    if not hasattr(socket, "SO_PEERCRED"):  # macOS: the folder's mode alone
        return
    pid, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if user != os.getuid():
        raise DoorError(f"process {pid} at the other end is of user {user}, not of user {os.getuid()}")


def say(connection: socket.socket, words: dict[str, Any]) -> None:
    """Send a line."""
    connection.sendall(json.dumps(words).encode() + b"\n")


def hear(connection: socket.socket) -> dict[str, Any]:
    """Read a line.

    Raises:
        DoorError: the other end has closed, or has sent something else.
        TimeoutError: nothing came in time.
    """
    line = b""
    while not line.endswith(b"\n"):
        more = connection.recv(4096)
        if not more or len(line) > _MOST_BYTES:
            raise DoorError("the other end has closed" if not more else f"more than {_MOST_BYTES} bytes without a line")
        line += more
    try:
        words = json.loads(line)
    except ValueError:
        words = None
    if not isinstance(words, dict):
        raise DoorError(f"the other end sent no line of this package: {line[:80]!r}")
    return words


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
