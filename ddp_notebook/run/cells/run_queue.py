"""The run queue: one cell, transfer or healing at a time has the ranks, in the order of arrival."""

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
_SAY_S = 0.5  # shorter waits are not reported


class GivenUpError(Exception):
    """A queue slot was given up while it waited."""


class QueueSlot:
    """A slot in the queue, which it joins when it is created. As a context it waits for the head of the queue.

    Args:
        queue: the queue.
        job: number of the job that owns the slot; None: a cell or transfer that a caller waits for.
        is_next: join in front of all waiting slots.
    """

    def __init__(self, queue: RunQueue, job: int | None = None, *, is_next: bool = False) -> None:
        self.job = job
        self._queue = queue
        self.wait_is_over = threading.Event()
        self.is_given_up = False
        queue.join(self, is_next=is_next)

    def __enter__(self) -> QueueSlot:
        """Wait until the slot is at the head of the queue. An interrupt ends the wait.

        Raises:
            KeyboardInterrupt: the wait was interrupted, and nothing was done.
            GivenUpError: the slot was given up, and nothing was done.
        """
        if not self.wait_is_over.is_set():
            self._wait()
        if self.is_given_up:
            raise GivenUpError
        return self

    def __exit__(self, *_: object) -> None:
        self._queue.leave(self)

    def give_up(self) -> bool:
        """Leave the queue if the slot still waits. Return whether it has left."""
        return self._queue.give_up(self)

    @property
    def ahead(self) -> list[int]:
        """Return the jobs ahead of the slot."""
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
        raise keyboard_interrupt(f"interrupted while waiting for {what}")


class RunQueue:
    """A queue of slots. As a context it uses a new slot of a cell or transfer that a caller waits for.

    Example:
        >>> queue = RunQueue()
        >>> job = QueueSlot(queue, job=1)
        >>> other = QueueSlot(queue)
        >>> other.ahead, other.give_up(), job.give_up()
        ([1], True, False)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: deque[QueueSlot] = deque()  # the first one has the ranks

    def __enter__(self) -> None:
        QueueSlot(self).__enter__()

    def __exit__(self, *_: object) -> None:
        self.leave(self._places[0])

    @contextmanager
    def if_free(self) -> Iterator[bool]:
        """Acquire the ranks without waiting. Yield whether that was possible."""
        place = QueueSlot(self)
        if place.wait_is_over.is_set() or not place.give_up():  # it may reach the head between the two checks
            with place:
                yield True
        else:
            yield False

    def join(self, place: QueueSlot, *, is_next: bool) -> None:
        """Add a slot at the end of the queue, or directly after its head."""
        with self._lock:
            self._places.insert(1 if is_next else len(self._places), place)
            self._tell_the_first()

    def leave(self, place: QueueSlot) -> None:
        """Remove a slot that is at the head or that no thread waits for."""
        with self._lock:
            self._places.remove(place)
            self._tell_the_first()

    def give_up(self, place: QueueSlot) -> bool:
        """Remove a waiting slot, see `QueueSlot.give_up`."""
        with self._lock:
            if place not in self._places or place is self._places[0]:
                return False
            self._places.remove(place)
            place.is_given_up = True
            place.wait_is_over.set()
            return True

    def jobs_before(self, place: QueueSlot) -> list[int]:
        """Return the jobs ahead of a slot, see `QueueSlot.ahead`."""
        with self._lock:
            if place not in self._places:
                return []
            before = list(self._places)[: self._places.index(place)]
        return [one.job for one in before if one.job is not None]

    @property
    def waiting_jobs(self) -> list[int]:
        """Return the jobs that are not at the head of the queue."""
        with self._lock:
            return [place.job for place in list(self._places)[1:] if place.job is not None]

    def _tell_the_first(self) -> None:
        if self._places:
            self._places[0].wait_is_over.set()


def in_words(jobs: list[int]) -> str:
    """Return a list of jobs as text, such as `"jobs 1 and 2"`.

    Example:
        >>> in_words([3]), in_words([1, 2, 5])
        ('job 3', 'jobs 1, 2 and 5')
    """
    *most, last = map(str, jobs)
    return f"jobs {', '.join(most)} and {last}" if most else f"job {last}"
