"""A line of output that tells how far something is."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_EVERY_S = 0.2  # interval of progress updates
_FIRST_S = 1.0  # shorter work shows no progress
_SILENT_S = 2.0  # after so long without a word the line shows the time ...
_TICK_S = 1.0  # ... and updates it so often


class ProgressLine:
    """Grows by what is done, and replaces at its end what is under way.

    Args:
        head: what it begins with, once there is something to tell.
        waits: what is waited for until the first stage is done; "": it is not known.

    Example:
        >>> line = ProgressLine("starting:")
        >>> for text in ("hosts 1.2 s", "ranks 2.0 s"):
        ...     line(text)
        starting:  hosts 1.2 s  ranks 2.0 s
    """

    def __init__(self, head: str, waits: str = "") -> None:
        self._line = head
        self._waits = waits
        self._has_begun = False
        self._behind = 0  # characters of the line with what is under way; 0: that is not shown
        self._began_s = self._told_s = time.monotonic()  # a fast action shows no progress
        self._lock = threading.Lock()

    def __call__(self, text: str) -> None:
        """Add text about finished work. Text that starts with a carriage return is about work in progress."""
        with self._lock:
            if text.startswith("\r"):
                now_s = time.monotonic()
                if now_s - self._told_s > _EVERY_S and now_s - self._began_s > _FIRST_S:
                    self._told_s = now_s
                    self._replace(f"{self._line}  {text[1:]}")
                return
            self._told_s = time.monotonic()
            before, self._line = self._line, f"{self._line}  {text}"
            if self._behind:
                self._replace(self._line)
                self._behind = 0
            else:
                print(self._line.removeprefix(before) if self._has_begun else self._line, end="", flush=True)
            self._has_begun = True

    def show_time(self) -> None:
        """Show the elapsed time if no text came for 2 s."""
        with self._lock:
            now_s = time.monotonic()
            if now_s - self._told_s >= _SILENT_S:
                waits = f"{self._waits} " if self._waits and not self._has_begun else ""
                self._replace(f"{self._line}  {waits}... {now_s - self._began_s:.0f} s")

    def _replace(self, line: str) -> None:
        erased = f"\r{' ' * self._behind}" if len(line) < self._behind else ""
        print(f"{erased}\r{line}", end="", flush=True)
        self._behind = len(line)

    def end(self) -> None:
        """Nothing more comes. What was under way goes, and where nothing was done the whole line."""
        with self._lock:
            if self._behind:
                self._replace(self._line if self._has_begun else "")
            if self._has_begun:
                print(flush=True)


@contextmanager
def shown(head: str, waits: str = "") -> Iterator[ProgressLine]:
    """Show such a line until the block ends.

    Args:
        head, waits: see `ProgressLine`.
    """
    line = ProgressLine(head, waits)
    is_over = threading.Event()

    def show_time() -> None:
        while not is_over.wait(_TICK_S):
            line.show_time()

    clock = threading.Thread(target=show_time, name="ddp-progress", daemon=True)
    clock.start()
    try:
        yield line
    finally:
        is_over.set()
        clock.join()
        line.end()
