"""Detect without a wait whether the process at the other end of a stream answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

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
