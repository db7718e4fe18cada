"""A running cell: collects output and results from I/O threads for the thread that waits."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ddp_notebook.messages.ranks import CellDone, Display, InputRequest
from ddp_notebook.records.operation import Operation
from ddp_notebook.records.units import bundle_chars
from ddp_notebook.run.cells.result import CellResult, RankResult

_HIGH_WATER_CHARS = 4_000_000  # unshown output, above which back-pressure stops the ranks
_EACH_CHARS = 400  # added for each piece of text, for the time that handling it takes
_LINE_CHARS = 80  # added for each line
_PIECE_CHARS = 8192  # longer text is split, so that the stop button is handled between two pieces
_LAST_LINES = 30  # a dying rank's last lines, which the error repeats
STREAMS = {1: "stdout", 2: "stderr"}


@dataclass(frozen=True, slots=True)
class OutputItem:
    """Something to show: text of a stream, a page, a display of a rank, or a request of its `input()`."""

    rank: int
    text: str = ""
    stream: str = "stdout"
    display: Display | None = None
    ask: InputRequest | None = None

    @property
    def chars(self) -> int:
        """Return the cost of showing it, in characters."""
        chars = _EACH_CHARS + len(self.text) + _LINE_CHARS * self.text.count("\n")
        return chars if self.display is None else chars + bundle_chars(self.display.content.get("data") or {})


class CellRun:
    """A cell that was sent to ranks.

    `shown` is a queue of output items. None only wakes up the waiting thread: the cell is over, or needs attention.
    """

    def __init__(self, number: int, ranks: list[int], hold_text: Callable[[bool], None]) -> None:
        self.number = number
        self._hold_text = hold_text
        self._held = False
        self._unshown_chars = 0
        self.name = "the cell"
        self.folds: bool | None = None  # merge lines of ranks; None: as the session does
        self.is_watched = True  # a thread waits for it
        self.began_s = time.monotonic()
        self.asks = False  # a rank waits or has waited for `input()`
        self.was_quit = False  # the user has ended it in a debugger
        self.is_patient = False  # no reader yet: keep the newest output without back-pressure
        self.left_out_chars = 0  # characters dropped from `shown`
        self.took: Callable[[int, Display], None] = lambda *_: None  # called with each display taken from `shown`
        self.note: Callable[[str], None] = lambda _: None  # shows a sentence with the cell's output
        self.is_cut_off = False  # no text arrives, and so no mark of the cell's end
        self.has_failed = False  # the cell failed or a process died on a rank, while other ranks continue
        # description of a stopped child process, by the rank that waits for it
        self.stopped_children: dict[int, str] = {}
        self.result = CellResult({rank: RankResult() for rank in ranks})
        self.shown: queue.SimpleQueue[OutputItem | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._open = {rank: {"text", "done"} for rank in ranks}  # outstanding parts by rank

    @property
    def ranks(self) -> list[int]:
        """Return the ranks of the cell."""
        return list(self.result.by_rank)

    @property
    def pending(self) -> list[int]:
        """Return the ranks on which the cell has not ended."""
        with self._lock:
            return sorted(self._open)

    @property
    def is_over(self) -> bool:
        return not self._open

    @property
    def failed_by_itself(self) -> bool:
        """Return whether a rank has failed or died, and not because the cell was ended."""
        return any(one.failed_by_itself for one in self.result.by_rank.values())

    def reads(self, rank: int) -> bool:
        """Return whether more text of this rank is expected."""
        return "text" in self._open.get(rank, ())

    def wake(self) -> None:
        """Wake up the waiting thread. May be called from a signal handler."""
        self.shown.put(None)

    def on_text(self, rank: int, fd: int, text: str) -> None:
        """Add text that a rank wrote in this cell."""
        stream = STREAMS[fd]
        self.result[rank].text[stream].append(text)
        for at in range(0, len(text), _PIECE_CHARS):
            self._show(OutputItem(rank, text[at : at + _PIECE_CHARS], stream))

    def _show(self, item: OutputItem) -> None:
        with self._lock:  # also around `_hold_text`, so that its calls keep the order of the decisions
            if not self.is_watched:
                self._note_taken(item)
                return
            self._unshown_chars += item.chars
            while self.is_patient and self._unshown_chars > _HIGH_WATER_CHARS:
                oldest = self.shown.get_nowait() if not self.shown.empty() else None
                self._note_taken(oldest)
                chars = 0 if oldest is None else oldest.chars
                self._unshown_chars -= chars
                self.left_out_chars += chars
                if self.shown.empty():
                    break
            if not self.is_patient and not self._held and self._unshown_chars > _HIGH_WATER_CHARS:
                self._held = True
                self._hold_text(True)
            self.shown.put(item)

    def next_item(self, timeout_s: float) -> OutputItem | None:
        """Return the next item to show. Return None after a wake-up or at the timeout."""
        try:
            item = self.shown.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if item is not None:
            self._note_taken(item)
            with self._lock:
                self._unshown_chars -= item.chars
                if self._held and self._unshown_chars < _HIGH_WATER_CHARS // 4:
                    self._held = False
                    self._hold_text(False)
        return item

    def leave(self) -> None:
        """Stop waiting: keep results that still arrive, but queue no output."""
        with self._lock:
            self.is_watched = False
            while not self.shown.empty():
                self._note_taken(self.shown.get_nowait())
            if self._held:
                self._held = False
                self._hold_text(False)

    def _note_taken(self, item: OutputItem | None) -> None:
        if item is not None and item.display is not None:
            self.took(item.rank, item.display)

    def on_text_end(self, rank: int, duration_s: float | None) -> None:
        """Handle the end of a rank's text. With a duration the cell succeeded, and no `CellDone` follows."""
        if duration_s is not None:
            one = self.result[rank]
            one.status, one.duration_s = "ok", duration_s
        self._close(rank, *(("text",) if duration_s is None else ("text", "done")))

    def cut_off(self) -> None:
        """Stop expecting text and its marks: the cell ends when `CellDone` has arrived from all ranks."""
        self.is_cut_off = True

    def on_unheard_end(self, rank: int) -> None:
        """Handle a rank that is not in the cell any more, or never was, and whose result was not received."""
        if rank in self._open and self.result[rank].status == "running":
            self.result[rank].status, self.result[rank].place = "interrupted", "an unknown place"
        self._close(rank, "text", "done")

    def on_display(self, rank: int, display: Display) -> None:
        """Add a display of a rank."""
        data = display.content.get("data") or {}
        if display.msg_type == "execute_result" and data:
            self.result[rank].result = data.get("text/plain")
        else:
            handle = (display.content.get("transient") or {}).get("display_id")
            self.result[rank].displays.add_display(display.msg_type, data, handle)
        self._show(OutputItem(rank, display=display))

    def on_done(self, rank: int, done: CellDone) -> None:
        """Store the result of a rank. Text of the rank may still arrive."""
        one = self.result[rank]
        one.status, one.duration_s, one.has_group = done.status, done.duration_s, done.has_group
        one.place, one.was_freed, one.group = done.place, done.was_freed, done.group
        one.trains_apart, one.findings = done.trains_apart, done.findings
        one.groups_made = done.groups_made
        if done.operation is not None:
            one.operation = Operation.from_json(done.operation)
        if done.status != "ok":
            self.has_failed = True
            one.error = f"{done.ename}: {done.evalue}" if done.evalue else done.ename
            one.ename = done.ename
            one.traceback = done.traceback
        for part in done.payload:  # `x?` shows a page, `%load` returns text for the next cell
            text = part["data"].get("text/plain", "") if part["source"] == "page" else part["text"]
            self._show(OutputItem(rank, text + "\n"))
        self._close(rank, "done")
        if self.is_cut_off:
            self._close(rank, "text")
        if done.status != "ok":
            self.wake()

    def on_died(self, rank: int, how: str, last_words: str = "") -> bool:
        """Handle the end of a rank's process, after all of its text. Return whether the cell's error includes its last
        words.
        """
        if rank not in self.result.by_rank:
            return False  # the rank does not run this cell
        one = self.result[rank]
        is_told = rank in self._open and one.status == "running"
        if is_told:
            one.status, one.error = "died", how
            self.has_failed = True
            one.traceback = [f"the rank's process ended: {how}", *last_words.splitlines()[-_LAST_LINES:]]
        self._close(rank, "text", "done")
        self.wake()
        return is_told

    def revive(self, ranks: Sequence[int]) -> None:
        """Expect results from new processes of dead ranks, which run this cell too."""
        with self._lock:
            for rank in ranks:
                self.result.by_rank[rank] = RankResult(text=self.result[rank].text)
                self._open[rank] = {"text", "done"}
            self._see_failures()

    def on_renumbered(self, stayed: Mapping[int, int]) -> None:
        """Renumber the results: there are fewer ranks, and the cell continues without the dead ones.

        Args:
            stayed: former number of each remaining rank, by its new number.
        """
        with self._lock:
            self.result.by_rank = {now: self.result[before] for now, before in stayed.items()}
            self._open = {now: self._open[before] for now, before in stayed.items() if before in self._open}
            self._see_failures()

    def close_all(self) -> None:
        """Stop expecting anything from any rank."""
        for rank in self.ranks:
            self._close(rank, "text", "done")

    def _see_failures(self) -> None:
        self.has_failed = any(one.status not in ("ok", "running") for one in self.result.by_rank.values())

    def _close(self, rank: int, *what: str) -> None:
        with self._lock:
            left = self._open.get(rank)
            if left is None:
                return
            left.difference_update(what)
            if left:
                return
            del self._open[rank]
            over = not self._open
        if over:
            self.wake()
