"""Identify and close the TCP sockets of this process.

gloo's waits cannot be stopped: aborting, destroying or shutting down the group from another thread does not end a
waiting operation. Shutting down its sockets ends it at once with an error, on this rank and its peers.

A gloo group has one listener and one event loop (epoll). The epoll contains the listener, the group's connections and a
pipe, but nothing else. The kernel lists the file descriptors of an epoll. So this process can find a group's
connections by itself: ranks need not exchange ports, and an unrelated socket with an equal port number is not affected.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import contextlib, os, re, socket, stat

_FDS, _FDS_INFO = "/proc/self/fd", "/proc/self/fdinfo"
# Source: https://docs.kernel.org/filesystems/proc.html (fdinfo, eventpoll files)
_TARGET = re.compile(r"^tfd:\s*(\d+) .*\bino:([0-9a-f]+)", re.MULTILINE)
_MAPPED = "::ffff:"  # prefix of an IPv4 address to which an IPv6 socket is connected

Address = tuple[str, int]


class TcpSocket(NamedTuple):
    """A TCP socket of this process."""

    inode: int  # unique until reboot, also after sockets were closed
    name: Address
    peer: Address | None  # None if it listens or is not connected
    listens: bool


def tcp_sockets() -> Iterator[tuple[TcpSocket, socket.socket]]:
    """Yield each socket with a duplicate, which is valid until the next item.

    An action on the duplicate concerns exactly that socket, even if another thread closes its descriptor.
    """
    for fd in _fds():
        try:
            if not os.readlink(f"{_FDS}/{fd}").startswith("socket:"):
                continue
            duplicate = socket.socket(fileno=os.dup(int(fd)))
        except OSError:
            continue  # closed by another thread
        with duplicate:
            if duplicate.family not in (socket.AF_INET, socket.AF_INET6) or duplicate.type != socket.SOCK_STREAM:
                continue
            try:
                listens = bool(duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
                name = _address(duplicate.getsockname())
            except OSError:
                continue
            peer = None
            with contextlib.suppress(OSError):
                peer = _address(duplicate.getpeername())
            yield TcpSocket(os.fstat(duplicate.fileno()).st_ino, name, peer, listens), duplicate


def listeners() -> dict[int, Address]:
    """Return the listening sockets of this process, by inode."""
    return {found.inode: found.name for found, _ in tcp_sockets() if found.listens}


def gloo_listeners(before: Collection[int]) -> dict[int, Address]:
    """Return new listeners of gloo groups, by inode.

    Listeners of other threads are left out: they are in no event loop, or in one that contains more than TCP
    connections.

    Args:
        before: inodes of earlier listeners.
    """
    found = [one for one, _ in tcp_sockets()]
    new = {one.inode: one.name for one in found if one.listens and one.inode not in before}
    if not new or not (loops := _loops()):  # gVisor lists nothing
        return new
    tcp = {one.inode for one in found}
    return {inode: name for inode, name in new.items() if any(inode in loop <= tcp for loop in loops)}


def cut_groups(own: Collection[int]) -> int:
    """Shut down reading on the connections of gloo groups. gloo then closes them, and the peers notice.

    The listeners stay open: gloo ends the process when one of its own listeners fails. Writing is not shut down. gloo's
    event loop starts a send when its receiver is ready, and would report a failure there to no thread. For waits that
    remain, see `stuck_waits`.

    If epolls cannot be listed, only connections that the peers have opened are closed. Each connection is one of these
    at one of its ends.

    Args:
        own: inodes of the groups' listeners.

    Returns:
        Number of connections.
    """
    names = {name for inode, name in listeners().items() if inode in own}
    held = {inode for loop in _loops() if not loop.isdisjoint(own) for inode in loop}
    return _cut(lambda found: found.inode in held or found.name in names, socket.SHUT_RD)


def cut_stores(servers: Collection[Address], starting: Collection[int] = ()) -> int:
    """Shut down the connections to stores, and those of stores in this process.

    Args:
        servers: addresses of the stores.
        starting: inodes of listeners of this process that may belong to a store.

    Returns:
        Number of connections.
    """
    ports = {name[1] for inode, name in listeners().items() if inode in starting}
    return _cut(
        lambda found: found.peer in servers or found.name in servers or found.name[1] in ports, socket.SHUT_RDWR
    )


def knock(address: Address, numbers: int) -> None:
    """Connect once as each peer that gloo still waits for, and disconnect at once.

    A group that is being made waits for connections that may never come. It has no socket that could be closed. A peer
    sends its number in 8 bytes, so one connection with each number ends the wait.

    Args:
        address: address of gloo's listener.
        numbers: number of ranks in the group.
    """
    for number in range(numbers):
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=0.1) as peer:
            peer.sendall(number.to_bytes(8, sys.byteorder))


def addresses(host: str, port: int) -> set[Address]:
    """Return the addresses to which a client of this server may be connected. Empty if the host is not known."""
    try:
        return {_address(found[4]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except OSError:
        return set()


def _address(name: tuple[Any, ...]) -> Address:
    return name[0].removeprefix(_MAPPED), name[1]


def _fds() -> list[str]:
    return os.listdir(_FDS) if os.path.isdir(_FDS) else []


def _loops() -> list[set[int]]:
    """Return the inodes in each epoll of this process, except pipes."""
    loops = []
    for epoll in _fds():
        with contextlib.suppress(OSError):  # closed by another thread
            if os.readlink(f"{_FDS}/{epoll}") == "anon_inode:[eventpoll]":
                with open(f"{_FDS_INFO}/{epoll}") as file:
                    targets = _TARGET.findall(file.read())
                inodes = {int(inode, 16): fd for fd, inode in targets}
                loops.append({inode for inode, fd in inodes.items() if not _is_pipe(fd, inode)})
    return [loop for loop in loops if loop]


def _is_pipe(fd: str, inode: int) -> bool:
    try:
        found = os.stat(f"{_FDS}/{fd}")
    except OSError:
        return False
    return stat.S_ISFIFO(found.st_mode) and found.st_ino == inode


def _cut(is_meant: Callable[[TcpSocket], bool], how: int) -> int:
    """Shut down the matching connections. Return their number."""
    count = 0
    for found, duplicate in tcp_sockets():
        if found.peer is not None and not found.listens and is_meant(found):
            with contextlib.suppress(OSError):
                duplicate.shutdown(how)
                count += 1
    return count
