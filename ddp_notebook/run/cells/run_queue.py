"""Whose turn it is: one cell, transfer or healing has the ranks at a time, in the order in which they came."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from ddp_notebook.run.cells.interrupt import Interrupts, keyboard_interrupt
from ddp_notebook.run.notebook_kernel import is_users_thread

_LOOK_S = 0.2
_SAY_S = 0.5  # a wait that is over sooner needs no word


class GivenUpError(Exception):
    """A place was given up before its turn came."""


class QueueSlot:
    """A place in the queue, from when it is made. A block that is entered with it waits for its turn, and has it.

    Args:
        queue: the queue.
        job: the number of the job that has it; None: a cell or a transfer that somebody waits for.
        is_next: it is before all others that wait.
    """

    def __init__(self, queue: RunQueue, job: int | None = None, *, is_next: bool = False) -> None:
        self.job = job
        self._queue = queue
        self.wait_is_over = threading.Event()
        self.is_given_up = False
        queue.join(self, is_next=is_next)

    def __enter__(self) -> QueueSlot:
        """Wait for the turn. An interrupt ends the wait, with a message that says so.

        Raises:
            KeyboardInterrupt: nothing was done.
            GivenUpError: likewise.
        """
        if not self.wait_is_over.is_set():
            self._wait()
        if self.is_given_up:
            raise GivenUpError
        return self

    def __exit__(self, *_: object) -> None:
        self._queue.leave(self)

    def give_up(self) -> bool:
        """Leave the queue, unless it has its turn. Returns whether it has left."""
        return self._queue.give_up(self)

    @property
    def ahead(self) -> list[int]:
        """The jobs that come before it."""
        return self._queue.jobs_before(self)

    def _wait(self) -> None:
        say_at = time.monotonic() + _SAY_S if is_users_thread() else float("inf")
        with Interrupts(lambda: None) as interrupts:
            while not self.wait_is_over.wait(_LOOK_S if interrupts.takes_signals else None):
                if interrupts.count:
                    break
                if time.monotonic() > say_at and (jobs := self.ahead):
                    say_at = float("inf")
                    it = "it" if len(jobs) == 1 else "them"
                    print(
                        f"waiting until {in_words(jobs)} {'has' if len(jobs) == 1 else 'have'} ended, since cells and "
                        f"jobs run in turn. The stop button ends this wait and not {it}",
                        file=sys.stderr,
                    )
            if not interrupts.count:
                return
        jobs = self.ahead
        self._queue.leave(self)
        if jobs:
            what = f"{in_words(jobs)} to end: nothing was done. %ddp_cancel ends {'it' if len(jobs) == 1 else 'them'}"
        else:
            what = "an earlier cell to end: nothing was done. %ddp_interrupt ends that cell"
        raise keyboard_interrupt(f"interrupted while it waited for {what}")


class RunQueue:
    """A queue of places. As a context, it takes a place of a cell or a transfer that somebody waits for.

    Example:
        >>> queue = RunQueue()
        >>> job = QueueSlot(queue, job=1)
        >>> other = QueueSlot(queue)
        >>> other.ahead, other.give_up(), job.give_up()
        ([1], True, False)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: deque[QueueSlot] = deque()  # the first one has the turn

    def __enter__(self) -> None:
        QueueSlot(self).__enter__()

    def __exit__(self, *_: object) -> None:
        self.leave(self._places[0])

    @contextmanager
    def if_free(self) -> Iterator[bool]:
        """Take it without a wait. Yields whether that was possible."""
        place = QueueSlot(self)
        if place.wait_is_over.is_set() or not place.give_up():  # its turn may come between the two
            with place:
                yield True
        else:
            yield False

    def join(self, place: QueueSlot, *, is_next: bool) -> None:
        """Put a place at the end of the queue, or behind the one that has its turn."""
        with self._lock:
            self._places.insert(1 if is_next else len(self._places), place)
            self._tell_the_first()

    def leave(self, place: QueueSlot) -> None:
        """The turn of a place is over, or nobody waits for it any more."""
        with self._lock:
            self._places.remove(place)
            self._tell_the_first()

    def give_up(self, place: QueueSlot) -> bool:
        """See `QueueSlot.give_up`."""
        with self._lock:
            if place not in self._places or place is self._places[0]:
                return False
            self._places.remove(place)
            place.is_given_up = True
            place.wait_is_over.set()
            return True

    def jobs_before(self, place: QueueSlot) -> list[int]:
        """See `QueueSlot.ahead`."""
        with self._lock:
            if place not in self._places:
                return []
            before = list(self._places)[: self._places.index(place)]
        return [one.job for one in before if one.job is not None]

    @property
    def waiting_jobs(self) -> list[int]:
        """The jobs whose turn has not come."""
        with self._lock:
            return [place.job for place in list(self._places)[1:] if place.job is not None]

    def _tell_the_first(self) -> None:
        if self._places:
            self._places[0].wait_is_over.set()


def in_words(jobs: list[int]) -> str:
    """`"jobs 1 and 2"`.

    Example:
        >>> in_words([3]), in_words([1, 2, 5])
        ('job 3', 'jobs 1, 2 and 5')
    """
    *most, last = map(str, jobs)
    return f"jobs {', '.join(most)} and {last}" if most else f"job {last}"
