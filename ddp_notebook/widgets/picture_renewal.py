"""Decides when the picture of `%ddp_monitor` in a saved notebook is drawn again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ddp_notebook.observe.tables.recorded import RecordedTables
from ddp_notebook.records.codec import Batch
from ddp_notebook.records.schema import SPANS

SETTLE_S = 0.6  # wait after the last rows of a cell
_SHARE = 20  # while a cell runs, drawing takes at most 1/20 of the time
_DRAWN = ("metric", "call", "rpc")  # tables whose rows can change the picture
_CELL = SPANS.index("cell")


class PictureRenewal:
    """Schedule of the picture: soon after each cell with new rows, and rarely while a cell runs.

    Args:
        recording: Recording that the picture shows.
    """

    def __init__(self, recording: RecordedTables) -> None:
        self._recording = recording
        self._came = threading.Event()  # set if there are rows that the picture does not show
        self._last_s = self._began_s = self._drawn_s = time.monotonic()
        self._took_s = 0.0
        self.on_rows: Callable[[], object] = lambda: None  # called when the picture becomes stale, in any thread
        recording.listeners.append(self._on_batch)

    def close(self) -> None:
        """Stop watching the recording."""
        if self._on_batch in self._recording.listeners:
            self._recording.listeners.remove(self._on_batch)

    @property
    def is_stale(self) -> bool:
        """Return whether there are rows that the picture does not show."""
        return self._came.is_set()

    def make_stale(self) -> None:
        """Mark the picture as stale, because the recording already has rows."""
        self._came.set()
        self.on_rows()

    def note_end(self) -> None:
        """Note that a cell has ended; its last rows may still arrive."""
        self._last_s = time.monotonic()

    def waits_s(self, now_s: float, *, runs: bool) -> float:
        """Return the seconds until the picture may be drawn.

        Args:
            runs: A cell runs, so rows keep arriving.
        """
        seldom_s = self._drawn_s + _SHARE * self._took_s
        return (max(seldom_s, self._drawn_s + SETTLE_S) if runs else self._last_s + SETTLE_S) - now_s

    def begin(self) -> None:
        """Note that drawing starts."""
        self._came.clear()  # first, so that rows that arrive during drawing make the picture stale again
        self._began_s = time.monotonic()

    def end(self) -> None:
        """Note that drawing has finished."""
        self._drawn_s = time.monotonic()
        self._took_s = self._drawn_s - self._began_s

    def _on_batch(self, batch: Batch) -> None:
        """Mark the picture as stale if the batch changes it. Called in the thread that feeds the recording."""
        rows = batch.tables
        spans = rows.get("span")
        if any(len(rows.get(name, ())) for name in _DRAWN) or (spans is not None and (spans["kind"] != _CELL).any()):
            self._last_s = time.monotonic()
            if not self._came.is_set():
                self._came.set()
                self.on_rows()
