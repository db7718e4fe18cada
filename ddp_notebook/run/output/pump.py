"""Thread for messages that take long to handle: displays, widget messages, and the cell results after them.

The wire's thread only puts them into a queue, so replies, clocks and acknowledgements never wait for output. The queue
is short, because ranks send only a few messages ahead (`receipts`).
"""

from __future__ import annotations

import logging
import queue
import threading

from ddp_notebook.messages.encoding import Message
from ddp_notebook.run.message_handlers import Handlers

_log = logging.getLogger(__name__)


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
