"""Flow control for displays and widget messages to the notebook.

A rank can send much faster than a front end can show. Without a limit, replies and the end of the cell would be queued
after seconds of output. The queue would fill the memory of the rank and the notebook. So:

- The notebook acknowledges shown messages (`Taken`). A rank sends only a few messages beyond the last acknowledgement.
  A thread that displays more blocks.
- Values of widgets and updates of displays replace each other. Only the newest one is queued, and its sender does not
  block.

Text has a separate limit: the size of its pipe.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

from ddp_notebook.messages.encoding import Message
from ddp_notebook.messages.ranks import TAKEN_EVERY, Comm, Display, InputRequest, Taken
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import contextlib, logging, threading, time

_MOST_OF_SESSION = 128  # maximum number of unshown messages of all ranks; Jupyter processes them in 0.15 s
_FEWEST = 2 * TAKEN_EVERY  # minimum limit of each rank
_MOST_BYTES = 2 << 20  # limit in bytes of each rank, but at least as many messages as one acknowledgement covers
_LOOK_S = 0.005
_APART_S = 0.05  # minimum time between two values of one widget, or two updates of one display
_BROKEN_S = 0.2

_log = logging.getLogger(__name__)


class _Lane:
    """Unacknowledged messages of one kind."""

    def __init__(self) -> None:
        self.number = 0  # number of the last message
        self._open: deque[tuple[int, int]] = deque()  # (number, bytes) of each message
        self._nbytes = 0

    def has_room(self, most: int) -> bool:
        return len(self._open) < most and (self._nbytes < _MOST_BYTES or len(self._open) < TAKEN_EVERY)

    def add(self, number: int, nbytes: int) -> None:
        self._open.append((number, nbytes))
        self._nbytes += nbytes

    def remove(self, until: int) -> None:
        """Remove acknowledged messages, up to this number."""
        while self._open and self._open[0][0] <= until:
            self._nbytes -= self._open.popleft()[1]


class Outgoing:
    """Sends displays and widget messages in order, and limits the number of unshown ones.

    Args:
        send: sends a message to the notebook. Thread-safe, does not block.
        mark: writes the mark of a display to the rank's text; may block.
        world_size: returns the number of ranks, which share the limit.
    """

    def __init__(
        self, send: Callable[[Message], None], mark: Callable[[int], None], world_size: Callable[[], int]
    ) -> None:
        self._send = send
        self._mark = mark
        self._world_size = world_size
        self._lanes: dict[str, _Lane] = {Display.__name__: _Lane(), Comm.__name__: _Lane()}
        self._lock = threading.Lock()
        self._marking = threading.Lock()
        self._unmarked: deque[int] = deque()  # sent displays without a mark
        self._newest: dict[Hashable, tuple[Any, int]] = {}  # key -> queued message and its bytes
        self._recent: set[Hashable] = set()  # keys sent within `_APART_S`
        self._has_work = threading.Event()
        self._thread: threading.Thread | None = None
        self._has_failed = False  # sending a queued message has failed before

    def send(self, message: Comm | Display, nbytes: int, key: Hashable = None) -> None:
        """Send a message, or queue it until the notebook can show more.

        Args:
            message: display or widget message.
            nbytes: approximate size.
            key: key of a value or an update. A later message with this key may replace this one, and the call does not
                block. None: the message is sent after all queued ones, and the call blocks until the limit allows it.
        """
        while True:
            with self._lock:
                has_room = self._lanes[type(message).__name__].has_room(self._most)
                if key is not None and (key in self._newest or key in self._recent or not has_room):
                    waiting = self._newest.get(key)
                    self._newest[key] = (message if waiting is None else _merged(waiting[0], message)), nbytes
                    break
                if has_room:
                    if key is None:
                        self._send_waiting()
                    else:
                        self._recent.add(key)
                    self._send_now(message, nbytes)
                    break
            time.sleep(_LOOK_S)
        if key is not None:
            self._wake()
        self._mark_all()

    def send_at_once(self, message: InputRequest) -> None:
        """Send a request with its place in the text, after all queued messages and without regard to the limit."""
        with self._lock:
            self._send_waiting()
            lane = self._lanes[Display.__name__]
            lane.number = number = lane.number + 1
            self._send(replace(message, place=number))
            self._unmarked.append(number)
        self._mark_all()

    def flush(self) -> None:
        """Send all queued messages without regard to the limit, such as the last values at the end of a cell."""
        if self._newest:
            with self._lock:
                self._send_waiting()
        self._mark_all()

    def on_taken(self, taken: Taken) -> None:
        """Process an acknowledgement. Called in the agent's thread."""
        with self._lock:
            self._lanes[taken.kind].remove(taken.number)

    # ---- hold the lock

    @property
    def _most(self) -> int:
        return max(_FEWEST, _MOST_OF_SESSION // self._world_size())

    def _send_waiting(self, *, only_with_room: bool = False) -> None:
        for key in list(self._newest):
            message, nbytes = self._newest[key]
            if only_with_room and not self._lanes[type(message).__name__].has_room(self._most):
                return
            self._recent.add(key)
            self._send_now(message, nbytes)
            del self._newest[key]  # at the end: if interrupted here, a value is sent twice instead of lost

    def _send_now(self, message: Comm | Display, nbytes: int) -> None:
        lane = self._lanes[type(message).__name__]
        lane.number = number = lane.number + 1
        if isinstance(message, Display):
            # Write the mark after sending: text waits at a mark for its display, but a display never waits.
            self._send(replace(message, place=number))
            self._unmarked.append(number)
        else:
            self._send(replace(message, number=number))
        lane.add(number, nbytes)

    # ---- without the lock

    def _mark_all(self) -> None:
        """Write the marks of all sent displays.

        A thread returns only when its own displays are marked, so its next text follows them.
        """
        if not self._unmarked:
            return
        with self._marking:
            while self._unmarked:
                place = self._unmarked[0]
                try:
                    self._mark(place)
                except OSError:  # the pipe is closed, so this display will not be shown
                    with self._lock:
                        self._lanes[Display.__name__].remove(place)
                with contextlib.suppress(IndexError):
                    self._unmarked.popleft()

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._send_later, name="ddp-outgoing", daemon=True)
            self._thread.start()
        self._has_work.set()

    def _send_later(self) -> None:
        """Send queued values and updates when the limit allows it, at least `_APART_S` after the last ones."""
        pause = threading.Event()
        while True:
            self._has_work.wait()
            self._has_work.clear()
            while self._recent or self._newest:
                pause.wait(_APART_S)
                try:
                    with self._lock:
                        self._recent.clear()
                        self._send_waiting(only_with_room=True)
                    self._mark_all()
                except Exception:  # a cell replaced a function that sending needs; retry after the cell
                    if not self._has_failed:
                        self._has_failed = True
                        _log.exception("a value of a widget could not be sent")
                    pause.wait(_BROKEN_S)


def _merged(earlier: Comm | Display, later: Comm | Display) -> Comm | Display:
    """Merge two messages with the same key into one."""
    if isinstance(earlier, Display) or isinstance(later, Display):
        return later
    data = later.content["data"]
    state = {**earlier.content["data"]["state"], **data["state"]}
    return replace(later, content={**later.content, "data": {**data, "state": state}})
