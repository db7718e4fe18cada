"""A line of output that shows progress."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_EVERY_S = 0.2  # interval of progress updates
_FIRST_S = 1.0  # shorter work shows no progress
_SILENT_S = 2.0  # after this time without text the line shows the elapsed time ...
_TICK_S = 1.0  # ... and updates it at this interval


def _is_importing(name: str) -> bool:
    """Return whether this process is importing a module, as far as importlib shows it: a first import takes seconds."""
    return bool(getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False))


class ProgressLine:
    """A line that appends finished stages, and shows current work at its end.

    Args:
        head: start of the line, shown with the first text.
        waits: work before the first stage is complete; "": unknown.

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
        self._behind = 0  # characters of the line with current work; 0: not shown
        self._began_s = self._told_s = time.monotonic()  # a fast action shows no progress
        self._lock = threading.Lock()

    def __call__(self, text: str) -> None:
        """Add text about finished work. Text that starts with a carriage return describes current work."""
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
        """Show the elapsed time if no text was added for 2 s."""
        with self._lock:
            now_s = time.monotonic()
            if now_s - self._told_s >= _SILENT_S:
                waits = "" if self._has_begun else self._waits
                waits = "importing torch in the notebook" if _is_importing("torch") else waits
                self._replace(f"{self._line}  {waits}{' ' * bool(waits)}... {now_s - self._began_s:.0f} s")

    def _replace(self, line: str) -> None:
        erased = f"\r{' ' * self._behind}" if len(line) < self._behind else ""
        print(f"{erased}\r{line}", end="", flush=True)
        self._behind = len(line)

    def end(self) -> None:
        """End the line. Current work is removed, and the whole line if nothing was finished."""
        with self._lock:
            if self._behind:
                self._replace(self._line if self._has_begun else "")
            if self._has_begun:
                print(flush=True)


@contextmanager
def shown(head: str, waits: str = "") -> Iterator[ProgressLine]:
    """Show a progress line until the block ends.

    Args:
        head, waits: see `ProgressLine`.
    """
    line = ProgressLine(head, waits)
    is_over = threading.Event()

    def show_time() -> None:
        while not is_over.wait(_TICK_S):
            line.show_time()

    clock = threading.Thread(target=show_time, name="ddp-progress", daemon=True)
    try:
        clock.start()  # in the block: an interrupt of its wait must end the thread
        yield line
    finally:
        is_over.set()
        if clock.is_alive():
            clock.join()
        line.end()
