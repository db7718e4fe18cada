"""The TCP sockets of this process: told apart by their ports, and cut.

gloo's waits cannot be stopped: aborting, destroying or shutting down the group from another thread has no effect on an
operation that waits. Shutting down its sockets ends it at once with an error, here and at the peers. One end of each of
gloo's connections is a port that gloo listens on, so its connections are known exactly.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Collection, Iterator
from typing import NamedTuple

_FDS = "/proc/self/fd"


class TcpSocket(NamedTuple):
    """A TCP socket of this process."""

    fd: int
    port: int
    peer_port: int  # 0: it listens, or is not connected
    listens: bool


def tcp_sockets() -> Iterator[tuple[TcpSocket, socket.socket]]:
    """Each socket with a duplicate, valid until the next one: an action on the duplicate concerns exactly that socket,
    whatever another thread closes meanwhile."""
    if not os.path.isdir(_FDS):
        return
    for name in os.listdir(_FDS):
        try:
            if not os.readlink(f"{_FDS}/{name}").startswith("socket:"):
                continue
            duplicate = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # closed meanwhile
        with duplicate:
            if duplicate.family not in (socket.AF_INET, socket.AF_INET6) or duplicate.type != socket.SOCK_STREAM:
                continue
            try:
                listens = bool(duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
                port = duplicate.getsockname()[1]
            except OSError:
                continue
            peer_port = 0
            with contextlib.suppress(OSError):
                peer_port = duplicate.getpeername()[1]
            yield TcpSocket(int(name), port, peer_port, listens), duplicate


def listening_ports() -> set[int]:
    """Ports that this process listens on."""
    return {found.port for found, _ in tcp_sockets() if found.listens}


def cut(ports: Collection[int]) -> int:
    """Shut down the connections that have one of these ports at either end. Listening sockets are left alone: gloo ends
    the process when one of its own fails.

    Returns:
        How many there were.
    """
    count = 0
    for found, duplicate in tcp_sockets():
        if not found.listens and found.peer_port and (found.port in ports or found.peer_port in ports):
            with contextlib.suppress(OSError):
                duplicate.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def knock(port: int, numbers: int) -> None:
    """Pretend to be each peer that gloo still waits for, and leave at once.

    A group that is being made waits for connections that may never come, and has no socket that could be cut. A peer
    introduces itself with a number of 8 bytes, so connecting once with each number ends the wait.

    Args:
        port: where gloo listens here.
        numbers: how many ranks the group has.
    """
    hosts = [one.getsockname()[0] for found, one in tcp_sockets() if found.listens and found.port == port]
    for number in range(numbers if hosts else 0):
        with contextlib.suppress(OSError), socket.create_connection((hosts[0], port), timeout=0.1) as peer:
            peer.sendall(number.to_bytes(8, sys.byteorder))
