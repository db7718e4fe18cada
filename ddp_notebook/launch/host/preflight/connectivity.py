"""Whether other hosts are reached from here: connections tried before a group forms, without a thread or a wait.

A host listens where its ranks will, and says a word to whoever connects; a host that connects expects the other's word,
so something else that answers at the same address is told from it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ddp_notebook.errors import StartError
from ddp_notebook.launch.transports.ports import first_free
from ddp_notebook.messages.encoding import Message
from ddp_notebook.messages.hosts import (
    ConnectReply,
    ConnectRequest,
    ConnectTarget,
    DoneReply,
    ListenReply,
    ListenRequest,
    StopListeningRequest,
)

_BACKLOG = 256
_LONGEST_WORD_BYTES = 64


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


class Reach:
    """What one host server does for it.

    Args:
        selector: of the server's loop, which calls what is registered with a socket.
    """

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._sockets: list[socket.socket] = []
        self.handlers: dict[type[Message], Callable[[Any], Message | Connecting]] = {  # each returns the reply
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
        """Return the port, one of these; 0: it cannot be."""

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
    """Connections to other hosts, all at once, from whatever address the route to each has, as gloo and the store do.

    Args:
        targets: address, port and word of each.
        timeout_s: seconds that they get.
    """

    def __init__(self, targets: Sequence[ConnectTarget], timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._until = time.monotonic() + timeout_s
        self._tried = [""] * len(targets)  # what went wrong
        self._open: dict[int, socket.socket] = {}  # by number of the target
        self._expected = [word.encode() for *_, word in targets]
        self._poll = select.poll()
        self._number_of: dict[int, int] = {}  # of the target, by file descriptor
        for number, (address, port, _) in enumerate(targets):
            self._begin(number, address, port)

    def _begin(self, number: int, address: str, port: int) -> None:
        one = socket.socket(_family(address), socket.SOCK_STREAM)
        one.setblocking(False)
        try:
            status = one.connect_ex((address, port))
        except OSError as error:  # no address at all
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
        """Return the reply; None: not yet."""
        for fd, _ in self._poll.poll(0):
            number = self._number_of[fd]
            with contextlib.suppress(BlockingIOError):  # connected, and nothing is said yet
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
