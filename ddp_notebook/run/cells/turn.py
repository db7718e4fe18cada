"""Whose turn it is: one cell, transfer or healing has the ranks at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ddp_notebook.run.cells.interrupt import Interrupts, keyboard_interrupt

_LOOK_S = 0.2


class Turn:
    """A lock. An interrupt ends the wait for it, with a message that says so.

    Raises:
        KeyboardInterrupt: on entry; nothing was done.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        if self._lock.acquire(blocking=False):
            return
        with Interrupts(lambda: None) as interrupts:
            while True:
                is_ours = self._lock.acquire(timeout=_LOOK_S)
                if interrupts.count:
                    break
                if is_ours:
                    return
            if is_ours:  # and somebody has pressed meanwhile
                self._lock.release()
        raise keyboard_interrupt(
            "interrupted while it waited for an earlier cell to end: nothing was done. %ddp_interrupt ends that cell"
        )

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    @contextmanager
    def if_free(self) -> Iterator[bool]:
        """Take it without a wait. Yields whether that was possible."""
        is_ours = self._lock.acquire(blocking=False)
        try:
            yield is_ours
        finally:
            if is_ours:
                self._lock.release()
