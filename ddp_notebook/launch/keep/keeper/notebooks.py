"""The notebooks of a kept session: who is there, who drives, and what each is told."""

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

_MOST_WAITING = 256 << 20  # bytes that a notebook has not taken, above which it counts as gone
_EACH_BYTES = 220  # what an event takes besides, roughly


class Notebook:
    """One that is there.

    Args:
        stream: to it.
        number: no other gets it.
        pid: its process.
        about: it, in words.
    """

    def __init__(self, stream: socket.socket, number: int, pid: int, about: str) -> None:
        self.number = number
        self.about = about
        self.drives = self.has_driven = False
        self.cancelled: set[int] = set()  # requests that it does not wait for any more
        self.is_welcome = False  # it has been told how things are, and hears what comes
        self._who = processes.identity(pid)
        self._channel = Channel(stream)
        self._events: queue.SimpleQueue[tuple[Event, int] | None] = queue.SimpleQueue()
        self._waiting = 0  # bytes
        self._most_waiting = float("inf")
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._write, name="ddp-to-notebook", daemon=True)
        self._thread.start()

    @property
    def lives(self) -> bool:
        """Whether its process does: a child that it has forked may hold its stream open."""
        return processes.is_running(self._who)

    def send(self, event: Event, number: int = 0) -> None:
        """Send it something, in this order. Does not wait.

        Args:
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
        """Tell it how things are, and from now on what comes.

        Args:
            events: as large as the journal may be, so they are no sign that it takes nothing.
        """
        for event in events:
            self.send(event)
        with self._lock:
            self._most_waiting = self._waiting + _MOST_WAITING
        self.is_welcome = True

    def hear(self) -> Numbered | None:
        """Wait for its next message. None: it is gone."""
        came = self._channel.receive()
        return came if isinstance(came, Numbered) else None

    def close(self, wait_s: float = 0.0) -> None:
        """End the stream, after what waits was sent or these seconds."""
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
                return  # who reads from it sees its end
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
    """All that are there. Its lock is also the journal's: what is written there and what is told keep one order."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.all: list[Notebook] = []
        self._left: set[Notebook] = set()  # whose process may live
        self._numbers = itertools.count(1)

    @property
    def driver(self) -> Notebook | None:
        """The one that drives, if its process lives."""
        with self.lock:
            return next((one for one in self.all if one.drives and one.lives), None)

    @property
    def may_come(self) -> bool:
        """Whether something of who drives may still come, if only of its end."""
        with self.lock:
            return any(one.drives for one in self.all)

    def add(self, stream: socket.socket, pid: int, about: str) -> Notebook:
        """One has come."""
        notebook = Notebook(stream, next(self._numbers), pid, about)
        with self.lock:
            self.all.append(notebook)
        return notebook

    def remove(self, notebook: Notebook) -> None:
        """It is gone, or has no business here any more."""
        with self.lock:
            if notebook in self.all:
                self.all.remove(notebook)
            self._left.add(notebook)
        notebook.drives = False
        notebook.close()

    def give(self, notebook: Notebook, *, take_over: bool) -> None:
        """Let it drive, if nobody does or it takes over; who did is closed, and can end nothing any more."""
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
        """Tell all that were welcomed."""
        with self.lock:
            for notebook in self.all:
                if notebook.is_welcome:
                    notebook.send(event)

    def remove_dead(self) -> None:
        """Forget those whose process has ended, although something holds their stream open."""
        with self.lock:
            for notebook in [one for one in self.all if not one.lives]:
                self.remove(notebook)

    def ended(self) -> list[int]:
        """Numbers of those that are gone and whose process has ended since this was called last."""
        with self.lock:
            ended = {one for one in self._left if not one.lives}
            self._left -= ended
        return [one.number for one in ended]

    def close(self) -> None:
        """The session ends."""
        for notebook in list(self.all):
            notebook.close(wait_s=1.0)
