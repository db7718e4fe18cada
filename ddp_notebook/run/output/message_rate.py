"""Rate of messages to the front end. Jupyter Server drops messages above 1000 per second, averaged over 3 s.

Source: `iopub_msg_rate_limit` and `rate_limit_window` of jupyter_server's `ZMQChannelsWebsocketConnection`, which does
not count comm openings.
"""

from __future__ import annotations

import threading
import time

_PER_S = 800.0  # with `BURST` of displays and some text: at most 3000 in any 3 s
# Messages allowed above the rate. Widgets, and changes between stdout and stderr, leave room for displays.
BURST = {"comms": 300, "changes": 300, "displays": 590}


class MessageRate:
    """Counts messages sent above the rate.

    Example:
        >>> pace = MessageRate()
        >>> pace.add(700)
        >>> pace.wait_s("comms") > pace.wait_s("displays") > 0
        True
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ahead = 0.0
        self._counted_s = time.monotonic()

    def add(self, messages: float) -> None:
        """Count sent messages. May be called in any thread."""
        with self._lock:
            self._ahead = self._now_ahead() + messages
            self._counted_s = time.monotonic()

    def wait_s(self, kind: str) -> float:
        """Return the seconds until a message of this kind may be sent; 0: immediately."""
        with self._lock:
            return max(0.0, (self._now_ahead() - BURST[kind]) / _PER_S)

    def _now_ahead(self) -> float:
        return max(0.0, self._ahead - _PER_S * (time.monotonic() - self._counted_s))


FRONT_END = MessageRate()  # a kernel has one connection for all output
