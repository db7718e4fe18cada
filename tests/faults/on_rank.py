"""Helpers for table entries on the ranks: synchronisation without a collective, and holding the interpreter."""

from __future__ import annotations

import collections
import itertools
import os
import sys
import threading
import time
from collections.abc import Collection
from pathlib import Path
from types import FrameType

_DEADLINE_S = 30.0
_BLOCKED_S = 0.06  # a main thread without context switches for this time is asleep


class Scene:
    """Progress marks of the ranks, as files that the ranks and the test can read.

    Args:
        directory: Directory of these files; empty at first.
        rank: Rank that sets marks; -1 for the test.
    """

    def __init__(self, directory: str, rank: int = -1) -> None:
        self.directory = Path(directory)
        self._rank = rank

    def mark(self, what: str) -> None:
        """Set a mark for this rank, with its time."""
        file = self.directory / f"{what}-{self._rank}"
        new = file.with_suffix(".new")
        new.write_text(f"{os.getpid()} {time.monotonic()}")
        new.rename(file)

    def mark_inside(self, what: str) -> None:
        """Set a mark when the main thread is in the next call of the cell."""
        cell, main = sys._getframe(1).f_code.co_filename, threading.get_ident()

        def watch() -> None:
            while _is_between(sys._current_frames()[main], cell):
                time.sleep(0.005)
            self.mark(what)

        threading.Thread(target=watch, daemon=True).start()

    def seen(self, what: str, rank: int) -> tuple[int, float] | None:
        """Return the process id and the monotonic time of a mark; None if it is not set."""
        try:
            pid, at_s = (self.directory / f"{what}-{rank}").read_text().split()
        except FileNotFoundError:
            return None
        return int(pid), float(at_s)

    def wait_for(self, what: str, ranks: Collection[int], *, blocked: bool = False) -> dict[int, tuple[int, float]]:
        """Wait until these ranks have set the mark and, if `blocked`, are asleep."""
        until = time.monotonic() + _DEADLINE_S
        while time.monotonic() < until:
            marks = {rank: found for rank in ranks if (found := self.seen(what, rank)) is not None}
            if len(marks) == len(ranks) and (not blocked or _are_blocked([pid for pid, _ in marks.values()])):
                return marks
            time.sleep(0.01)
        raise TimeoutError(f"not within {_DEADLINE_S:g} s: ranks {sorted(ranks)} {what}, only {sorted(marks)} are")


def _is_between(frame: FrameType | None, cell: str) -> bool:
    """Return whether a main thread is in the cell's own lines, or in those that start the watch."""
    if frame is None or frame.f_code.co_filename == cell:
        return True
    while frame is not None and frame.f_code.co_filename != cell:
        if frame.f_code.co_filename == __file__:
            return True
        frame = frame.f_back
    return False


def _are_blocked(pids: Collection[int]) -> bool:
    """Return whether all these main threads are asleep for a while."""
    before = [_switches(pid) for pid in pids]
    if None in before:
        return False
    time.sleep(_BLOCKED_S)
    return before == [_switches(pid) for pid in pids]


def _switches(pid: int) -> str | None:
    """Return the context switches of a sleeping main thread; None if it is running."""
    status = Path(f"/proc/{pid}/task/{pid}/status").read_text()
    if "\nState:\tS" not in status:
        return None
    return status.partition("\nvoluntary_ctxt_switches")[2]


def hold_interpreter(seconds: float) -> None:
    """Run one call in C that blocks all other threads and signal handlers for this time."""
    until = time.monotonic() + seconds
    collections.deque(itertools.takewhile(until.__gt__, iter(time.monotonic, None)), maxlen=0)
