"""Host server's side of the preflight check, which compares hosts before a group forms, see `launch.preflight`.

It returns facts about its host that may change or take time to collect, and tests connections to other hosts without a
thread or a wait. A host listens at the address of its ranks, and sends a word to each connection. A connecting host
expects the word of the other host, so that it detects another program at the same address.
"""

from __future__ import annotations

import contextlib
import errno
import getpass
import os
import select
import selectors
import socket
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from ddp_notebook.errors import StartError
from ddp_notebook.launch.transports.ports import first_free
from ddp_notebook.messages.encoding import Message
from ddp_notebook.messages.hosts import (
    ClockRequest,
    ClockTimeReply,
    ConnectReply,
    ConnectRequest,
    ConnectTarget,
    DoneReply,
    ListenReply,
    ListenRequest,
    SiteReply,
    SiteRequest,
    StopListeningRequest,
)

_BACKLOG = 256
_LONGEST_WORD_BYTES = 64


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


class Reach:
    """Connection tests of one host server.

    Args:
        selector: of the server's loop, which calls the callback registered with a socket.
    """

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._sockets: list[socket.socket] = []
        self.handlers: dict[type[Message], Callable[[Any], Message | Connecting]] = {  # handlers that return the reply
            ListenRequest: self._listen_at,
            ConnectRequest: lambda request: Connecting(request.targets, request.within_s),
            StopListeningRequest: self._stop,
        }

    def _listen_at(self, request: ListenRequest) -> ListenReply:
        self._close()
        return ListenReply(ports=[self._listen(*place) for place in request.places])

    def _stop(self, _: StopListeningRequest) -> DoneReply:
        self._close()
        return DoneReply()

    def _listen(self, address: str, first: int, stop: int, word: str) -> int:
        """Return the port, which is in this range; 0 if listening is not possible."""

        def bind(port: int) -> socket.socket:
            return socket.create_server((address, port), family=_family(address), backlog=_BACKLOG)

        try:
            opened = first_free(bind, address, range(first, stop))
        except (OSError, StartError):
            return 0
        opened.setblocking(False)
        self._sockets.append(opened)
        self._selector.register(opened, selectors.EVENT_READ, partial(_greet, opened, word.encode()))
        return int(opened.getsockname()[1])

    def _close(self) -> None:
        for opened in self._sockets:
            self._selector.unregister(opened)
            opened.close()
        self._sockets.clear()


def _greet(listener: socket.socket, word: bytes) -> None:
    with contextlib.suppress(OSError):
        connection, _ = listener.accept()
        with connection:
            connection.setblocking(False)
            connection.send(word)


class Connecting:
    """Connections to other hosts, in parallel, from the address that the route to each has, as in gloo and the store.

    Args:
        targets: address, port and word of each.
        timeout_s: time limit in seconds.
    """

    def __init__(self, targets: Sequence[ConnectTarget], timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._until = time.monotonic() + timeout_s
        self._tried = [""] * len(targets)  # errors
        self._open: dict[int, socket.socket] = {}  # target number -> socket
        self._expected = [word.encode() for *_, word in targets]
        self._poll = select.poll()
        self._number_of: dict[int, int] = {}  # file descriptor -> target number
        for number, (address, port, _) in enumerate(targets):
            self._begin(number, address, port)

    def _begin(self, number: int, address: str, port: int) -> None:
        one = socket.socket(_family(address), socket.SOCK_STREAM)
        one.setblocking(False)
        try:
            status = one.connect_ex((address, port))
        except OSError as error:  # not an address
            status = error.errno or errno.EINVAL
        self._open[number] = one
        self._number_of[one.fileno()] = number
        if status in (0, errno.EINPROGRESS):
            self._poll.register(one, select.POLLIN)  # the word, or an error
        else:
            self._end(number, os.strerror(status))

    def _end(self, number: int, what: str) -> None:
        one = self._open.pop(number)
        del self._number_of[one.fileno()]
        with contextlib.suppress(KeyError):
            self._poll.unregister(one)
        one.close()
        self._tried[number] = what

    def advance(self) -> ConnectReply | None:
        """Return the reply; None if it is not finished."""
        for fd, _ in self._poll.poll(0):
            number = self._number_of[fd]
            with contextlib.suppress(BlockingIOError):  # connected, but no word has arrived yet
                self._end(number, self._hear(number))
        if self._open and time.monotonic() > self._until:
            for number in list(self._open):
                self._end(number, f"no answer in {self._timeout_s:g} s")
        return None if self._open else ConnectReply(tried=self._tried)

    def _hear(self, number: int) -> str:
        one = self._open[number]
        if status := one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            return os.strerror(status)
        try:
            word = one.recv(_LONGEST_WORD_BYTES)
        except ConnectionError as error:
            return str(error.strerror)
        return "" if word == self._expected[number] else "something else answers there"


# ---- facts about the host

# Files that shape the environment of a shell started by ssh, and so of the server and its ranks.
_SHAPING = (
    "~/.bashrc", "~/.bash_profile", "~/.bash_login", "~/.profile", "~/.zshenv", "~/.zprofile", "~/.zshrc", "~/.cshrc",
    "~/.tcshrc", "~/.config/fish/config.fish", "~/.ssh/environment", "~/.ssh/rc", "~/.pam_environment",
    "/etc/environment", "/etc/profile", "/etc/bash.bashrc", "/etc/bashrc", "/etc/zsh/zshenv",
)  # fmt: skip


def _stamps() -> list[tuple[int, int] | None]:
    """Return the time stamps of these files."""
    return [_stamp(os.path.expanduser(path)) for path in _SHAPING]


def _stamp(path: str) -> tuple[int, int] | None:
    try:
        its = os.stat(path)
    except OSError:
        return None
    return its.st_mtime_ns, its.st_size


_at_start = _stamps()  # taken when the server imports this module


def _look(request: SiteRequest) -> SiteReply:
    return SiteReply(
        user=_user(),
        cuda=sys.modules["torch"].version.cuda or "",
        free_mib=psutil.virtual_memory().available >> 20,
        has_directory=Path(request.directory).is_dir(),
        has_marker=bool(request.marker) and Path(request.directory, request.marker).exists(),
    )


def _tell_time(_: ClockRequest) -> ClockTimeReply:
    return ClockTimeReply(time_ns=time.time_ns(), is_outdated=_stamps() != _at_start)


HANDLERS: dict[type[Message], Callable[[Any], Message]] = {SiteRequest: _look, ClockRequest: _tell_time}


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # the user id has no name, as in containers
        return ""
