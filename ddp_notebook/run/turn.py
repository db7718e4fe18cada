"""Who has the ranks for himself: one cell, transfer or healing at a time."""

from __future__ import annotations

import threading

from ddp_notebook.run.interrupt import Interrupts, keyboard_interrupt

_LOOK_S = 0.2


class Turn:
    """A lock whose wait ends at an interrupt, in words of its own.

    Raises:
        KeyboardInterrupt: on entry; nothing was done.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        if self._lock.acquire(blocking=False):
            return
        with Interrupts(lambda: None) as interrupts:
            while not interrupts.count:
                if self._lock.acquire(timeout=_LOOK_S):
                    return
        raise keyboard_interrupt(
            "interrupted while it waited for an earlier cell to end: nothing was done. %ddp_interrupt ends that cell"
        )

    def __exit__(self, *_: object) -> None:
        self._lock.release()
