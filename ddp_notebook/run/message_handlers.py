"""Where messages of ranks go: a table from the kind of a message to those who handle it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ddp_notebook.messages.encoding import Message

Handler = Callable[[int, Any], object]  # gets the rank and the message
Handlers = Mapping[type[Message], Handler]


class OnText(Protocol):
    """Gets text of a rank, from one of its two pipes."""

    def __call__(self, rank: int, fd: int, data: bytes) -> None: ...


class OfCells(Protocol):
    """Who is told of what belongs to cells and is no message."""

    def on_text(self, rank: int, fd: int, data: bytes) -> None: ...
    def on_ended(self, rank: int, how: str) -> None: ...
    def on_gone(self) -> None: ...


class OfClient(Protocol):
    """The part of a session that has `session.client`."""

    def on_ended(self, rank: int, how: str) -> None: ...
    def on_controller_ended(self) -> None: ...
    def on_gone(self) -> None: ...


class Dispatch:
    """Hands on what ranks say, in I/O threads. A `launch.cluster.Listener`.

    The cluster is made with it, and the parts of a session with the cluster, so they enter themselves afterwards:
    before the ranks are started, since nothing comes earlier.

    Example:
        >>> from ddp_notebook.messages.ranks import Probe
        >>> dispatch = Dispatch()
        >>> dispatch.add({Probe: lambda rank, message: print(rank, message.request)})
        >>> dispatch.on_message(3, Probe(request=7))
        3 7
    """

    def __init__(self) -> None:
        self._handlers: dict[type[Message], list[Handler]] = {}
        self._cells: OfCells | None = None
        self._client: OfClient | None = None
        self.on_text: OnText = _drop_text

    def add(self, handlers: Handlers) -> None:
        """Have these kinds of messages handled. Several may handle one kind, in the order in which they were added."""
        for kind, handler in handlers.items():
            self._handlers.setdefault(kind, []).append(handler)

    def connect(self, cells: OfCells, client: OfClient) -> None:
        """Have text and ends of processes handled."""
        self._cells = cells
        self.on_text = cells.on_text
        self._client = client

    def on_message(self, rank: int, message: Message) -> None:
        """A message of a rank. What nobody has asked for is dropped."""
        for handle in self._handlers.get(type(message), ()):
            handle(rank, message)

    def on_ended(self, rank: int, how: str) -> None:
        """A rank's process ended."""
        if self._cells is not None:
            self._cells.on_ended(rank, how)
        if self._client is not None:
            self._client.on_ended(rank, how)

    def on_controller_ended(self) -> None:
        """ipyparallel's controller ended."""
        if self._client is not None:
            self._client.on_controller_ended()

    def on_gone(self) -> None:
        """The host server ended, and all with it."""
        if self._cells is not None:
            self._cells.on_gone()
        if self._client is not None:
            self._client.on_gone()


def _drop_text(rank: int, fd: int, data: bytes) -> None:
    pass
