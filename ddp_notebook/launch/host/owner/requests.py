"""Requests to a host server, and the replies for those who wait for them."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future

from ddp_notebook.errors import HostError
from ddp_notebook.launch.transports.base import Transport
from ddp_notebook.messages import framing
from ddp_notebook.messages.encoding import Message
from ddp_notebook.messages.hosts import PingRequest

Reply = Future[Message]


class HostGoneError(HostError):
    """The host server ended, and all it had started with it."""


class HostSilentError(HostError):
    """The host server lives but does not answer: it was stopped, it hangs, or its host is not heard."""


class HostTimeoutError(HostSilentError, TimeoutError):
    """The host server did not answer in time, and is not known to be stopped."""


class Requests:
    """The stream to one host server, as those use it who speak. From any thread.

    Args:
        transport: to the host.

    Attributes:
        gone: set once the server has ended.
        how_it_ended: then, in words.
    """

    def __init__(self, transport: Transport) -> None:
        self.gone = threading.Event()
        self.how_it_ended = ""
        self._transport = transport
        self._pending: dict[int, Reply] = {}
        self._count = 0
        self._lock = threading.Lock()

    def ask(self, message: Message) -> Reply:
        """Send a request. Its reply fails with HostGoneError where the server ends first."""
        reply: Reply = Future()
        with self._lock:
            self._count += 1
            frame = framing.pack_message(message, self._count)
            self._pending[self._count] = reply
            if self.gone.is_set():
                self._fail_pending()
            else:
                with contextlib.suppress(OSError):  # then the reader sees the end of the stream
                    self._transport.send(frame)
        return reply

    def send_frame(self, frame: bytes) -> None:
        """Send a frame that has no reply."""
        with self._lock, contextlib.suppress(OSError):
            self._transport.send(frame)

    def send(self, message: Message) -> None:
        """Send a request and ignore its reply."""
        self.send_frame(framing.pack_message(message))

    def speak(self) -> None:
        """Let the host hear that its owner lives. Not where somebody sends: that may take long, and says it too."""
        if self._lock.acquire(blocking=False):
            with contextlib.suppress(OSError):
                self._transport.send(framing.pack_message(PingRequest()))
            self._lock.release()

    # ---- the thread that reads

    def on_reply(self, number: int, message: Message) -> None:
        """A reply has come."""
        if (reply := self._pending.pop(number, None)) is not None:
            reply.set_result(message)

    def end(self, how: str) -> None:
        """The stream has ended: nobody waits for ever."""
        with self._lock:
            self.how_it_ended = how
            self.gone.set()
            self._fail_pending()

    def _fail_pending(self) -> None:
        for reply in self._pending.values():
            reply.set_exception(HostGoneError(self.how_it_ended))
        self._pending.clear()
