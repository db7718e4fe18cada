"""The thread that sends new data of a recording to the views: at most ten times a second, once a second if idle."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from ddp_notebook.records.codec import Batch
from ddp_notebook.widgets.feed.feed import Feed
from ddp_notebook.widgets.feed.messages import FeedMessage
from ddp_notebook.widgets.live_status import LiveStatus

PERIOD_S = 0.1
_IDLE_S = 0.5  # between two polls of a session that records nothing
_QUIET = {"resource"}  # tables that do not trigger a message
_CLOSE_S = 2.0
# Times after which a view without any message gets its snapshot again. Messages are lost if they arrive before the
# JavaScript of the view runs (marimo keeps none). If the kernel reads only after the cell, the view cannot request them
# earlier.
_AGAIN_S = (0.5, 1.5, 2.5, 4.0, 6.0, 9.0)
_log = logging.getLogger(__name__)
T = TypeVar("T")
Sink = Callable[[FeedMessage], None]


class Publisher:
    """Sends new data of one recording to its views. Sleeps while there is no view, and while no rows arrive.

    Args:
        feed: Feed that creates the messages.
        present: State of the ranks.
    """

    def __init__(self, feed: Feed, present: LiveStatus) -> None:
        self._feed = feed
        self._present = present
        self._sinks: list[Sink] = []
        self._unheard: dict[Sink, list[float]] = {}  # for each view without a message: times to send the snapshot again
        # protects the feed and the sinks, so that messages are sent in the order of their numbers
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self.cpu_s = 0.0  # processor time of the thread

    def __repr__(self) -> str:
        return f"<Publisher: {len(self._sinks)} views, {self._feed.seq} messages>"

    @property
    def feed(self) -> Feed:
        return self._feed

    def add(self, sink: Sink, *, may_miss: bool = False) -> None:
        """Add a view. It gets a snapshot, and then all new data.

        Args:
            may_miss: The view may not be ready yet. Repeat the snapshot a few times until `heard` is called.
        """
        with self._lock:
            sink(self.snapshot())
            if sink not in self._sinks:
                self._sinks.append(sink)
                if may_miss:
                    self._unheard[sink] = [time.monotonic() + after_s for after_s in _AGAIN_S]
            if self._thread is None and not self._closing.is_set() and self._feed.is_live:
                self._feed.recording.listeners.append(self._on_batch)
                self._thread = threading.Thread(target=self._run, name="ddp-monitor", daemon=True)
                self._thread.start()
        self._news.set()

    def remove(self, sink: Sink) -> None:
        """Remove a view."""
        with self._lock:
            self._unheard.pop(sink, None)
            if sink in self._sinks:
                self._sinks.remove(sink)

    def heard(self, sink: Sink) -> None:
        """Note that a view has sent a message. It is ready and requests missing data itself."""
        with self._lock:
            self._unheard.pop(sink, None)

    def head(self) -> dict[str, Any]:
        """Return the part of a message header that describes the current state of the session."""
        return self._present.head()

    def behind_s(self) -> float | None:
        """See `LiveStatus.behind_s`."""
        return self._present.behind_s()

    def catch_up(self, sink: Sink) -> None:
        """Send a snapshot to a view that has missed messages."""
        with self._lock:
            sink(self.snapshot())

    def snapshot(self) -> FeedMessage:
        if not self._feed.is_live and (ranks := self._present.look(0.0)) is not None:
            self._feed.delta(self._now_ns(), self._present.head(), ranks)
        return self._feed.snapshot(self._now_ns(), self._present.head())

    def with_feed(self, ask: Callable[[Feed, int], T]) -> T:
        """Call a function with the feed while the thread does not use it."""
        with self._lock:
            return ask(self._feed, self._now_ns())

    def close(self, *, session_ends: bool = False) -> None:
        """Send the remaining data to the views, and stop the thread."""
        if session_ends:
            self._present.end()
        self._closing.set()
        self._news.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(_CLOSE_S)
            if self._on_batch in self._feed.recording.listeners:
                self._feed.recording.listeners.remove(self._on_batch)

    def _now_ns(self) -> int:
        return time.monotonic_ns() if self._feed.is_live else self._feed.end_ns

    def _on_batch(self, batch: Batch) -> None:
        if not self._news.is_set() and not batch.tables.keys() <= _QUIET:
            self._news.set()

    def _run(self) -> None:
        while not self._closing.is_set():
            began_s = time.monotonic()
            try:
                with self._lock:
                    self._tick()
            except Exception:  # one message is lost; the views must continue
                _log.exception("an update could not be sent to the monitor")
            self.cpu_s = time.thread_time()
            waits = self._feed.has_news() or self._present.is_asking
            left_s = PERIOD_S - (time.monotonic() - began_s)
            self._closing.wait(max(left_s, PERIOD_S / 4))
            if not waits:
                self._news.wait(_IDLE_S - PERIOD_S)
            self._news.clear()
        with self._lock:
            self._tick()

    def _tick(self) -> None:
        now_s = time.monotonic()
        ranks = self._present.look(now_s) if self._sinks else None
        message = self._feed.delta(time.monotonic_ns(), self._present.head(), ranks)
        if message is not None:
            self._send(message, self._sinks)
        if due := [sink for sink, times_s in self._unheard.items() if times_s and now_s >= times_s[0]]:
            for sink in due:
                self._unheard[sink] = [at_s for at_s in self._unheard[sink] if at_s > now_s]
            self._send(self.snapshot(), due)

    def _send(self, message: FeedMessage, sinks: list[Sink]) -> None:
        for sink in list(sinks):
            try:
                sink(message)
            except Exception:  # the other views must still get the message
                _log.exception("an update could not be sent to a view")
