"""Requests to a host server and their replies, and the time without an answer of a process or progress of a thread."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from ddp_notebook.errors import HostError
from ddp_notebook.launch.transports.base import Transport
from ddp_notebook.messages import framing
from ddp_notebook.messages.encoding import Message
from ddp_notebook.messages.hosts import PingRequest

Reply = Future[Message]


class HostGoneError(HostError):
    """The host server ended, and all its processes with it."""


class HostSilentError(HostError):
    """The host server lives but does not answer: it was stopped, it hangs, or its host is unreachable."""


class HostTimeoutError(HostSilentError, TimeoutError):
    """The host server did not answer in time, and is not known to be stopped."""


class Requests:
    """Sends requests to one host server and matches the replies. From any thread.

    Args:
        transport: to the host.

    Attributes:
        gone: set once the server has ended.
        how_it_ended: the cause in words, set then.
    """

    def __init__(self, transport: Transport) -> None:
        self.gone = threading.Event()
        self.how_it_ended = ""
        self._transport = transport
        self._pending: dict[int, Reply] = {}
        self._count = 0
        self._lock = threading.Lock()

    def ask(self, message: Message) -> Reply:
        """Send a request. Its reply fails with HostGoneError if the server ends first."""
        reply: Reply = Future()
        with self._lock:
            self._count += 1
            frame = framing.pack_message(message, self._count)
            self._pending[self._count] = reply
            if self.gone.is_set():
                self._fail_pending()
            else:
                with contextlib.suppress(OSError):  # the reader will notice the end of the stream
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
        """Send the host a heartbeat. Skipped while another thread sends, which may take long and counts as a heartbeat
        too.
        """
        if self._lock.acquire(blocking=False):
            with contextlib.suppress(OSError):
                self._transport.send(framing.pack_message(PingRequest()))
            self._lock.release()

    # ---- the thread that reads

    def on_reply(self, number: int, message: Message) -> None:
        """Handle a reply."""
        if (reply := self._pending.pop(number, None)) is not None:
            reply.set_result(message)

    def end(self, how: str) -> None:
        """Fail all pending requests after the end of the stream."""
        with self._lock:
            self.how_it_ended = how
            self.gone.set()
            self._fail_pending()

    def _fail_pending(self) -> None:
        for reply in self._pending.values():
            reply.set_exception(HostGoneError(self.how_it_ended))
        self._pending.clear()


_EACH_S = 1.0  # between two pings
_MOST_S = 0.75  # longest interval in seconds that counts: this process may not have run for the rest


class Pulse:
    """Sends pings, and measures the time without an answer.

    Args:
        ping: sends a request that is answered at once. Does not wait.

    Example:
        >>> pulse = Pulse(lambda: Future())
        >>> pulse.poll() == 0.0 < pulse.poll()
        True
    """

    def __init__(self, ping: Callable[[], Future[Any]]) -> None:
        self._ping = ping
        self._lock = threading.Lock()
        self._open: Future[Any] | None = None
        self._sent_s = self._looked_s = float("-inf")
        self._heard = False  # data has arrived since the last poll
        self.unanswered_s = 0.0  # at the last poll

    def hear(self) -> None:
        """Record that data has arrived, so the process runs, even if its answer is still queued."""
        self._heard = True

    def forget(self) -> None:
        """Reset, so that the next poll sends another ping."""
        with self._lock:
            self._open, self._sent_s, self.unanswered_s = None, float("-inf"), 0.0

    def poll(self) -> float:
        """Return the seconds for which a ping has had no answer. Call it repeatedly."""
        with self._lock:
            now = time.monotonic()
            if self._open is None or self._open.done():
                if now - self._sent_s > _EACH_S:
                    self._open, self._sent_s = self._ping(), now
                self.unanswered_s = 0.0
            elif self._heard:
                self.unanswered_s = 0.0
            else:
                self.unanswered_s += min(now - self._looked_s, _MOST_S)
            self._heard, self._looked_s = False, now
            return self.unanswered_s


class Progress:
    """Measures the time in which a thread of this process makes no progress.

    Args:
        count: returns a number that the thread raises at least once per second.

    Example:
        >>> progress = Progress(lambda: 7)
        >>> progress.poll() == 0.0 < progress.poll()
        True
    """

    def __init__(self, count: Callable[[], int]) -> None:
        self._count = count
        self._last, self._looked_s = -1, float("-inf")
        self._stuck_s = 0.0

    def poll(self) -> float:
        """Return the seconds without progress. Call it repeatedly."""
        count, now = self._count(), time.monotonic()
        self._stuck_s = self._stuck_s + min(now - self._looked_s, _MOST_S) if count == self._last else 0.0
        self._last, self._looked_s = count, now
        return self._stuck_s
