"""Displays and widget messages on their way to the notebook: no more than it takes, and of values only the newest.

A rank can send far faster than a front end can show. Without a limit, replies to questions and the end of the cell
would queue behind seconds of output, and the queue would fill the memory of rank and notebook. So

- the notebook acknowledges what it has shown (`Taken`), and a rank sends only a few messages ahead of that. A thread
  that displays more waits;
- values of widgets and updates of displays replace each other. Only the newest waits, and its sender does not.

Text has its own limit: the pipe that it is written to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

from ddp_notebook.messages.encoding import Message
from ddp_notebook.messages.ranks import TAKEN_EVERY, Comm, Display, Taken
from ddp_notebook.stdlib import contextlib, logging, threading, time

_MOST_OF_SESSION = 128  # all ranks together send so many unshown messages: Jupyter accepts them in 0.15 s
_FEWEST = 2 * TAKEN_EVERY  # each rank may send so many
_MOST_BYTES = 2 << 20  # each rank may send so many, but always as many messages as are acknowledged at a time
_LOOK_S = 0.005
_APART_S = 0.05  # between two values of one widget, or two updates of one display
_BROKEN_S = 0.2

_log = logging.getLogger(__name__)


class _Lane:
    """The unacknowledged messages of one kind."""

    def __init__(self) -> None:
        self.number = 0  # the last message has this one
        self._open: deque[tuple[int, int]] = deque()  # number and bytes
        self._nbytes = 0

    def has_room(self, most: int) -> bool:
        return len(self._open) < most and (self._nbytes < _MOST_BYTES or len(self._open) < TAKEN_EVERY)

    def add(self, number: int, nbytes: int) -> None:
        self._open.append((number, nbytes))
        self._nbytes += nbytes

    def remove(self, until: int) -> None:
        """Messages up to this number were taken."""
        while self._open and self._open[0][0] <= until:
            self._nbytes -= self._open.popleft()[1]


class Outgoing:
    """Sends displays and widget messages in order, and limits how many the notebook has not shown yet.

    Args:
        send: passes a message to the notebook, from any thread; never blocks.
        mark: marks the place of a display in the rank's text; may block.
        world_size: the number of ranks, which share the limit.
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
        self._unmarked: deque[int] = deque()  # displays that were sent
        self._newest: dict[Hashable, tuple[Any, int]] = {}  # waiting messages, and their bytes
        self._recent: set[Hashable] = set()  # sent within `_APART_S`
        self._has_work = threading.Event()
        self._thread: threading.Thread | None = None
        self._has_failed = False  # to send what waited

    def send(self, message: Comm | Display, nbytes: int, key: Hashable = None) -> None:
        """Send a message, or keep it until the notebook takes more.

        Args:
            nbytes: its size, roughly.
            key: of a value or an update: a later message with this key may replace this one, and the call returns
                immediately. None: the message is sent after all that waits, and the call blocks until there is room.
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

    def flush(self) -> None:
        """Send all that waits, such as the last values at the end of a cell, whether or not there is room."""
        if self._newest:
            with self._lock:
                self._send_waiting()
        self._mark_all()

    def on_taken(self, taken: Taken) -> None:
        """The notebook has shown messages. Called in the agent's thread."""
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
            del self._newest[key]  # last: a value that an interrupt keeps here is sent twice, not lost

    def _send_now(self, message: Comm | Display, nbytes: int) -> None:
        lane = self._lanes[type(message).__name__]
        lane.number = number = lane.number + 1
        if isinstance(message, Display):
            # The mark is written after this: at a mark, text waits for its display, while a display waits for nothing.
            self._send(replace(message, place=number))
            self._unmarked.append(number)
        else:
            self._send(replace(message, number=number))
        lane.add(number, nbytes)

    # ---- without the lock

    def _mark_all(self) -> None:
        """Mark the places of all displays that were sent. A thread returns only when its own are marked, so what it
        prints next stands after them."""
        if not self._unmarked:
            return
        with self._marking:
            while self._unmarked:
                place = self._unmarked[0]
                try:
                    self._mark(place)
                except OSError:  # the pipe is gone, and with it the place of this display
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
        """Send values and updates that wait, as soon as there is room and `_APART_S` after the last ones."""
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
                except Exception:  # a cell has replaced a function that sending needs: that lasts until the cell ends
                    if not self._has_failed:
                        self._has_failed = True
                        _log.exception("a value of a widget could not be sent")
                    pause.wait(_BROKEN_S)


def _merged(earlier: Comm | Display, later: Comm | Display) -> Comm | Display:
    """One message in place of two with the same key."""
    if isinstance(earlier, Display) or isinstance(later, Display):
        return later
    data = later.content["data"]
    state = {**earlier.content["data"]["state"], **data["state"]}
    return replace(later, content={**later.content, "data": {**data, "state": state}})
