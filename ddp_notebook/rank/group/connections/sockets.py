"""The TCP sockets of this process: told apart exactly, and cut.

gloo's waits cannot be stopped: aborting, destroying or shutting down the group from another thread has no effect on an
operation that waits. Shutting down its sockets ends it at once with an error, here and at the peers.

A group of gloo's has one listener, and an event loop (epoll) that holds this and all of its connections, and nothing
else but a pipe. The kernel lists what an epoll holds. So a group's connections are known in this process alone: no rank
tells another where it listens, and a socket that has the number of some port elsewhere is not taken for one of them.
"""

from __future__ import annotations

import stat
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

from ddp_notebook.stdlib import contextlib, os, re, socket

_FDS, _FDS_INFO = "/proc/self/fd", "/proc/self/fdinfo"
# Source: https://docs.kernel.org/filesystems/proc.html (fdinfo, eventpoll files)
_TARGET = re.compile(r"^tfd:\s*(\d+) .*\bino:([0-9a-f]+)", re.MULTILINE)
_MAPPED = "::ffff:"  # before an IPv4 address that an IPv6 socket is connected to

Address = tuple[str, int]


class TcpSocket(NamedTuple):
    """A TCP socket of this process."""

    inode: int  # no other socket of this boot has it, whatever is closed meanwhile
    name: Address
    peer: Address | None  # None: it listens, or is not connected
    listens: bool


def tcp_sockets() -> Iterator[tuple[TcpSocket, socket.socket]]:
    """Each socket with a duplicate, valid until the next one: an action on the duplicate concerns exactly that socket,
    whatever another thread closes meanwhile."""
    for fd in _fds():
        try:
            if not os.readlink(f"{_FDS}/{fd}").startswith("socket:"):
                continue
            duplicate = socket.socket(fileno=os.dup(int(fd)))
        except OSError:
            continue  # closed meanwhile
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
    """The sockets that this process listens on, by inode."""
    return {found.inode: found.name for found, _ in tcp_sockets() if found.listens}


def gloo_listeners(before: Collection[int]) -> dict[int, Address]:
    """As `listeners`, but of gloo's groups, and without those that there were before. What another thread listens on
    meanwhile is in no event loop, or in one that holds more than TCP connections."""
    found = [one for one, _ in tcp_sockets()]
    new = {one.inode: one.name for one in found if one.listens and one.inode not in before}
    if not new or not (loops := _loops()):  # gVisor lists nothing
        return new
    tcp = {one.inode for one in found}
    return {inode: name for inode, name in new.items() if any(inode in loop <= tcp for loop in loops)}


def cut_groups(own: Collection[int]) -> int:
    """Shut down the connections of gloo's groups, for reading: gloo then closes them, and the peers see that. Their
    listeners are left alone: gloo ends the process when one of its own fails.

    Not for writing: a send that waits until its receiver is ready is begun by gloo's event loop, where a failure is
    told to nobody. What waits all the same, see `untold`.

    Where no epoll tells what it holds, those only that the peers have opened. Each is one of these at one of its ends.

    Args:
        own: their listeners, by inode.

    Returns:
        How many there were.
    """
    names = {name for inode, name in listeners().items() if inode in own}
    held = {inode for loop in _loops() if not loop.isdisjoint(own) for inode in loop}
    return _cut(lambda found: found.inode in held or found.name in names, socket.SHUT_RD)


def cut_stores(servers: Collection[Address], starting: Collection[int] = ()) -> int:
    """Shut down the connections to stores, and those of a store in this process.

    Args:
        servers: where they listen.
        starting: inodes of listeners of this process of which one may be a store's.

    Returns:
        How many there were.
    """
    ports = {name[1] for inode, name in listeners().items() if inode in starting}
    return _cut(
        lambda found: found.peer in servers or found.name in servers or found.name[1] in ports, socket.SHUT_RDWR
    )


def knock(address: Address, numbers: int) -> None:
    """Pretend to be each peer that gloo still waits for, and leave at once.

    A group that is being made waits for connections that may never come, and has no socket that could be cut. A peer
    introduces itself with a number of 8 bytes, so connecting once with each number ends the wait.

    Args:
        address: where gloo listens here.
        numbers: how many ranks the group has.
    """
    for number in range(numbers):
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=0.1) as peer:
            peer.sendall(number.to_bytes(8, sys.byteorder))


def addresses(host: str, port: int) -> set[Address]:
    """Where a client of this server may be connected to. None if the host is not known."""
    try:
        return {_address(found[4]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except OSError:
        return set()


def _address(name: tuple[Any, ...]) -> Address:
    return name[0].removeprefix(_MAPPED), name[1]


def _fds() -> list[str]:
    return os.listdir(_FDS) if os.path.isdir(_FDS) else []


def _loops() -> list[set[int]]:
    """What each epoll of this process holds, but for pipes: inodes."""
    loops = []
    for epoll in _fds():
        with contextlib.suppress(OSError):  # closed meanwhile
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
    """Shut down the connections that are meant."""
    count = 0
    for found, duplicate in tcp_sockets():
        if found.peer is not None and not found.listens and is_meant(found):
            with contextlib.suppress(OSError):
                duplicate.shutdown(how)
                count += 1
    return count
