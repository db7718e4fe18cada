"""The attached notebooks of a kept session: which one drives, and the messages to each."""

from __future__ import annotations

import itertools
import queue
import socket
import threading
from collections.abc import Iterable

from ddp_notebook.launch import processes
from ddp_notebook.launch.keep.channel import Channel
from ddp_notebook.launch.keep.keeper.journal import Event
from ddp_notebook.messages.framing import Numbered, ProcessText
from ddp_notebook.messages.keeper import RankMessage, TakenOver
from ddp_notebook.messages.ranks import Display, Recorded
from ddp_notebook.records.units import bundle_chars

_MOST_WAITING = 256 << 20  # bytes of unread messages above which a notebook counts as gone
_EACH_BYTES = 220  # approximate size of an event without its data


class Notebook:
    """One attached notebook.

    Args:
        stream: to it.
        number: unique in the session.
        pid: its process.
        about: its description for messages.
    """

    def __init__(self, stream: socket.socket, number: int, pid: int, about: str) -> None:
        self.number = number
        self.about = about
        self.drives = self.has_driven = False
        self.cancelled: set[int] = set()  # numbers of requests that it has cancelled
        self.is_welcome = False  # it has received the session state, and gets all new events
        self._who = processes.identity(pid)
        self._channel = Channel(stream)
        self._events: queue.SimpleQueue[tuple[Event, int] | None] = queue.SimpleQueue()
        self._waiting = 0  # bytes of unsent events
        self._most_waiting = float("inf")
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._write, name="ddp-to-notebook", daemon=True)
        self._thread.start()

    @property
    def lives(self) -> bool:
        """True if its process is alive. A forked child may hold its stream open after that."""
        return processes.is_running(self._who)

    def send(self, event: Event, number: int = 0) -> None:
        """Send an event, in the order of calls. Does not block.

        Args:
            event: to send.
            number: of the request that this answers.
        """
        nbytes = _size(event)
        with self._lock:
            self._waiting += nbytes
            too_much = self._waiting > self._most_waiting
        self._events.put((event, number))
        if too_much:
            self._channel.close()

    def welcome(self, events: Iterable[Event]) -> None:
        """Send the session state, and all new events from now on.

        Args:
            events: the state and the journal. Their size does not count as unread messages.
        """
        for event in events:
            self.send(event)
        with self._lock:
            self._most_waiting = self._waiting + _MOST_WAITING
        self.is_welcome = True

    def hear(self) -> Numbered | None:
        """Wait for its next message. Returns None if it has left."""
        came = self._channel.receive()
        return came if isinstance(came, Numbered) else None

    def close(self, wait_s: float = 0.0) -> None:
        """Close the stream, after unsent events were sent or these seconds."""
        self._events.put(None)
        if wait_s:
            self._thread.join(wait_s)
        self._channel.close()

    def _write(self) -> None:
        while (waiting := self._events.get()) is not None:
            event, number = waiting
            try:
                self._channel.send(event, number)
            except OSError:
                return  # the reader notices the end of the stream
            with self._lock:
                self._waiting -= _size(event)


def _size(event: Event) -> int:
    if isinstance(event, ProcessText):
        return _EACH_BYTES + len(event.data)
    message = event.message if isinstance(event, RankMessage) else None
    if isinstance(message, Display):
        return _EACH_BYTES + bundle_chars(message.content.get("data") or {})
    return _EACH_BYTES + (len(message.data) if isinstance(message, Recorded) else 0)


class Notebooks:
    """All attached notebooks. The lock also guards the journal, so that journal and sent events have the same order."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.all: list[Notebook] = []
        self._left: set[Notebook] = set()  # left notebooks whose process may be alive
        self._numbers = itertools.count(1)

    @property
    def driver(self) -> Notebook | None:
        """The driving notebook, if its process is alive."""
        with self.lock:
            return next((one for one in self.all if one.drives and one.lives), None)

    @property
    def may_come(self) -> bool:
        """True if messages of a driving notebook, or the end of its stream, may still arrive."""
        with self.lock:
            return any(one.drives for one in self.all)

    def add(self, stream: socket.socket, pid: int, about: str) -> Notebook:
        """Add a notebook that has attached."""
        notebook = Notebook(stream, next(self._numbers), pid, about)
        with self.lock:
            self.all.append(notebook)
        return notebook

    def remove(self, notebook: Notebook) -> None:
        """Remove a notebook that has left."""
        with self.lock:
            if notebook in self.all:
                self.all.remove(notebook)
            self._left.add(notebook)
        notebook.drives = False
        notebook.close()

    def give(self, notebook: Notebook, *, take_over: bool) -> None:
        """Make a notebook the driver, if there is none or it takes over. The stream of the former driver is closed."""
        with self.lock:
            before = self.driver
            if before is not None and not take_over:
                return
            for other in [one for one in self.all if one.drives]:
                self.all.remove(other)
                other.drives = False
                other.send(TakenOver(driver=notebook.about))
                threading.Thread(target=other.close, args=(1.0,), daemon=True).start()
            notebook.drives = notebook.has_driven = True

    def broadcast(self, event: Event) -> None:
        """Send an event to all notebooks that have received the session state."""
        with self.lock:
            for notebook in self.all:
                if notebook.is_welcome:
                    notebook.send(event)

    def remove_dead(self) -> None:
        """Remove notebooks whose process has ended but whose stream is still open."""
        with self.lock:
            for notebook in [one for one in self.all if not one.lives]:
                self.remove(notebook)

    def ended(self) -> list[int]:
        """Return the numbers of left notebooks whose process has ended since the last call."""
        with self.lock:
            ended = {one for one in self._left if not one.lives}
            self._left -= ended
        return [one.number for one in ended]

    def close(self) -> None:
        """Close all streams at the end of the session."""
        for notebook in list(self.all):
            notebook.close(wait_s=1.0)
