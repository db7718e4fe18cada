"""Dispatch messages of ranks: a table from the kind of a message to its handlers.

`Pump` is the thread for messages that take long to handle: displays, widget messages, and the cell results after them.
The wire's thread only puts them into a queue, so replies, clocks and acknowledgements never wait for output. The queue
is short, because ranks send only a few messages ahead (`receipts`).
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ddp_notebook.messages.encoding import Message

_log = logging.getLogger(__name__)
Handler = Callable[[int, Any], object]  # called with the rank and the message
Handlers = Mapping[type[Message], Handler]


class OnText(Protocol):
    """Callback for text of a rank, from one of its two pipes."""

    def __call__(self, rank: int, fd: int, data: bytes) -> None: ...


class OfCells(Protocol):
    """Handler of text and process ends, for cells."""

    def on_text(self, rank: int, fd: int, data: bytes) -> None: ...
    def on_ended(self, rank: int, how: str) -> None: ...
    def on_gone(self) -> None: ...


class OfClient(Protocol):
    """Handler of process ends, for `session.client`."""

    def on_ended(self, rank: int, how: str) -> None: ...
    def on_controller_ended(self) -> None: ...
    def on_gone(self) -> None: ...


class Dispatch:
    """Dispatches messages of ranks, in I/O threads. A `launch.cluster.Listener`.

    The cluster is created with it, and the parts of a session with the cluster. So the parts register afterwards, but
    before the ranks are started, since no message arrives earlier.

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
        """Register handlers. Several handlers of one kind are called in the order of registration."""
        for kind, handler in handlers.items():
            self._handlers.setdefault(kind, []).append(handler)

    def connect(self, cells: OfCells, client: OfClient) -> None:
        """Register the handlers of text and process ends."""
        self._cells = cells
        self.on_text = cells.on_text
        self._client = client

    def on_message(self, rank: int, message: Message) -> None:
        """Handle a message of a rank. A message without a handler is dropped."""
        for handle in self._handlers.get(type(message), ()):
            handle(rank, message)

    def on_ended(self, rank: int, how: str) -> None:
        """Handle the end of a rank's process."""
        if self._cells is not None:
            self._cells.on_ended(rank, how)
        if self._client is not None:
            self._client.on_ended(rank, how)

    def on_controller_ended(self) -> None:
        """Handle the end of the ipyparallel controller."""
        if self._client is not None:
            self._client.on_controller_ended()

    def on_gone(self) -> None:
        """Handle the end of the host server, which ends all ranks."""
        if self._cells is not None:
            self._cells.on_gone()
        if self._client is not None:
            self._client.on_gone()


def _drop_text(rank: int, fd: int, data: bytes) -> None:
    pass


class Pump:
    """Calls the handlers of messages in its own thread, in the order of arrival.

    Args:
        targets: the handlers.

    Example:
        >>> from ddp_notebook.messages.ranks import Probe
        >>> pump = Pump({Probe: lambda rank, message: print(rank, message.request)})
        >>> pump.handlers[Probe](3, Probe(request=7)); pump.settle()
        3 7
        >>> pump.close()
    """

    def __init__(self, targets: Handlers) -> None:
        self._targets = targets
        self._waiting: queue.SimpleQueue[tuple[int, Message] | threading.Event | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def handlers(self) -> Handlers:
        """Handlers that return immediately."""
        return dict.fromkeys(self._targets, self._put)

    def settle(self, timeout_s: float = 1.0) -> None:
        """Wait until all messages that arrived before this call are handled.

        Args:
            timeout_s: longest wait in seconds.
        """
        if self._thread is not None and threading.current_thread() is not self._thread:
            handled = threading.Event()
            self._waiting.put(handled)
            handled.wait(timeout_s)

    def close(self) -> None:
        """End the thread after it has handled the messages in the queue."""
        self._waiting.put(None)

    def _put(self, rank: int, message: Message) -> None:
        self._waiting.put((rank, message))
        if self._thread is None:  # the first message; all messages arrive in the same thread
            self._thread = threading.Thread(target=self._run, name="ddp-output", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            rank, message = item
            try:
                self._targets[type(message)](rank, message)
            except Exception:  # keep handling the next messages
                _log.exception("a message of rank %d was lost: %.200r", rank, message)
