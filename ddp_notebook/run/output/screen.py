"""Output of a cell's ranks in the notebook: live, folded, each line labelled with its ranks.

    [0-3] epoch 1
    [0-3] loss 0.51 | 0.48 | 0.55 | 0.49
    [0] saved

All text is sent as plain text, so nothing that a rank prints is interpreted as markup.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ddp_notebook.messages.ranks import Display
from ddp_notebook.records.units import size
from ddp_notebook.run.cells.cell import OutputItem
from ddp_notebook.run.output.card import STOP, Card
from ddp_notebook.run.output.display_target import DisplayTarget
from ddp_notebook.run.output.fold import Fold, Folded, Item, Tail
from ddp_notebook.run.output.labels import LONGEST_LABEL, labelled
from ddp_notebook.run.output.rate_limiter import RateLimiter, new_id
from ddp_notebook.run.output.slots import Bundle, OpenRow, OpenRows, Row
from ddp_notebook.run.output.unfinished import MOST_CHARS_OF_RANK, UPDATE_S, Unfinished

_LONGEST_CHARS = 100_000  # longer lines are split


def visible(line: str) -> str:
    """Return the text that a terminal shows after carriage returns have redrawn a line.

    Example:
        >>> visible("10 %\\r20 %\\r")
        '20 %'
    """
    if "\r" not in line:
        return line
    return next((part for part in reversed(line.split("\r")) if part), "")


def redrawn(text: str) -> str:
    """Return the last state of an unfinished line, kept for its next redraw.

    Example:
        >>> redrawn("10 %\\r20 %\\r")
        '20 %\\r'
    """
    return visible(text) + ("\r" if text.endswith("\r") else "")


def pieces(line: str) -> list[str]:
    """Split a long line, at the same positions on every rank.

    Example:
        >>> [len(piece) for piece in pieces("x" * 250_000)]
        [100000, 100000, 50000]
    """
    if len(line) <= _LONGEST_CHARS or "\r" in line:
        return [line]
    return [line[at : at + _LONGEST_CHARS] for at in range(0, len(line), _LONGEST_CHARS)]


_LATE_S = 2.0  # lines of late ranks are inserted between lines that were shown within this time
_OPEN_ROW_S = 5.0  # displays of late ranks get slots in a row that was shown within this time
_PARTIAL_LINE_S = 0.1  # a line without a line end is shown after this time
_TAIL_CHARS = 4000  # limit of text that may be shown again with another label
_MOST_CHARS = 5_000_000  # shown text of a cell, without labels; more output counts as a flood
_MOST_LINES_OF_RANK = 50_000  # shown lines of a cell, times its ranks (8 at most): each takes 20 us
_MOST_SENT_BYTES = 10_000_000  # text with its labels
_MOST_DISPLAY_CHARS = 5_000_000  # displays that do not replace another one
_LABEL_BYTES = 8  # label and end of a line on iopub
_HURRY_CHARS = 20_000  # text that is still shown after a press of stop
_LINE_CHARS = 20  # added for each line
_MOST_LINES = 2000  # lines that are added before the next refresh; a press of stop is noticed after it
_LAST_LINES = 10  # shown from the end of a flood, for each rank
_LONGEST_PAUSE_S = 64.0


class Screen:
    """Shows the output of one cell's ranks.

    Args:
        ranks: the ranks that run the cell.
        target: destination of the output; None: the destination of this thread's output.
        ends: action that ends the cell, for the hang card.
        is_stopped: returns whether stop was pressed while the remaining output of an ended cell is shown.
        may_clear: returns whether its ranks may clear the output, because nothing else is shown under the cell.
        holds: returns whether output waits for a view above it, see `RateLimiter`.
        folds: merge equal lines, and lines that differ only in numbers.
        log: description of the place that has the complete text.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        target: DisplayTarget | None = None,
        ends: str = STOP,
        is_stopped: Callable[[], bool] = lambda: False,
        may_clear: Callable[[], bool] = lambda: True,
        holds: Callable[[float, float], bool] = lambda *_: False,
        *,
        folds: bool = True,
        log: str = "session.log(rank)",
    ) -> None:
        self._ranks = ranks
        self._may_clear = may_clear
        self._rate_limiter = RateLimiter(target, holds)
        self._log = log
        self._is_stopped = is_stopped
        self.card = Card(self._rate_limiter, ends)
        self._fold = Fold(folds)
        self._is_grid = self._rate_limiter.is_live  # programs that convert a notebook handle images, but not HTML
        self._partial: dict[tuple[int, str], tuple[str, float]] = {}  # text and start time, by rank and stream
        self._unfinished = Unfinished(self._rate_limiter)
        self._tail: Tail | None = None
        self._tail_id = ""
        self._tail_updated_s = 0.0
        self._tail_began_s = 0.0
        self._tail_late_s = 0.0  # time when the last line was inserted
        self._no_tail_until_s = 0.0
        self._no_tail_for_s = 1.0  # doubled each time that no rank has joined a tail, because displays are expensive
        self._rows: dict[int, list[Row]] = {}  # rows with displays, by rank
        self._cleared: dict[int, list[Row]] = {}  # cleared rows that were not replaced yet, by rank
        self._replaces: set[int] = set()  # ranks that have displayed something since they cleared their output
        self._open_rows = OpenRows()
        self._has_notes = False  # shown notes, which ranks must not clear
        self._chars = self._display_chars = 0  # shown characters
        self._sent_bytes = 0  # estimated bytes of sent text
        self._received_chars = 0  # characters of text before folding
        self._received_lines = 0
        self._cost = 0  # handling time, in characters
        self._hurries_at = float("inf")
        self._new_lines = 0  # lines since the last refresh
        self._most_received_chars = _MOST_CHARS * min(8, len(ranks))
        self._most_received_lines = _MOST_LINES_OF_RANK * min(8, len(ranks))
        self._hidden: dict[int, int] = {}  # characters of a flood that were not shown, by rank
        self._hidden_displays = 0
        self._last_lines: dict[int, deque[str]] = {}

    # ---- input

    def show(self, item: OutputItem) -> None:
        """Show a piece of text or a display."""
        now = time.monotonic()
        if item.display is not None:
            self._on_display(item.rank, item.display, now)
            return
        if self._is_flood():
            self._hide(item.rank, item.text)
            return
        key = (item.rank, item.stream)
        text, since = self._partial.pop(key, ("", now))
        *lines, rest = (text + item.text).replace("\r\n", "\n").split("\n")
        for line in lines:
            for piece in pieces(line):
                self._add_line(item.rank, item.stream, piece, now)
        *begun, rest = pieces(rest)
        for piece in begun:
            self._add_line(item.rank, item.stream, piece, now)
        if rest:
            self._partial[key] = redrawn(rest), now if lines else since

    def show_between_cells(self, texts: Mapping[tuple[int, str], str]) -> None:
        """Show text that ranks wrote while no cell was running, by rank and stream."""
        self._has_notes |= bool(texts)
        for (rank, stream), text in texts.items():
            for line in text.splitlines():
                self._fold.add(rank, Item.line(stream, f"(between cells) {visible(line)}"), 0.0)
        self._emit(self._fold.take_all())

    def refresh(self, talking: Collection[int]) -> float | None:
        """Send output that may be shown now. Return the seconds until the next call; None: no further call.

        Args:
            talking: ranks that may send more output.
        """
        now = time.monotonic()
        self._new_lines = 0
        self._emit(self._take(now, talking), now, talking)
        waits = [
            self._fold.wait_s(now),
            self._update_tail(now),
            self._update_unfinished(now),
            self._rate_limiter.flush(now),
        ]
        return min((wait_s for wait_s in waits if wait_s is not None), default=None)

    def hurry(self) -> None:
        """Show the waiting output, but only the end of a flood, after a press of stop."""
        self._hurries_at = self._cost + _HURRY_CHARS
        self._rate_limiter.hurry()

    @property
    def is_full(self) -> bool:
        """Return whether more displays wait than the front end accepts now, so that back-pressure is needed."""
        return self._rate_limiter.is_full

    @property
    def is_due(self) -> bool:
        """Return whether the new lines should be shown before more are accepted."""
        return self._new_lines > _MOST_LINES

    def _is_flood(self) -> bool:
        return (
            self._chars > _MOST_CHARS
            or self._sent_bytes > _MOST_SENT_BYTES
            or self._received_chars > self._most_received_chars
            or self._received_lines > self._most_received_lines
            or self._cost > self._hurries_at
        )

    def note(self, text: str) -> None:
        """Show a line of this package."""
        self.finish()
        self._has_notes = True
        self._rate_limiter.write("stderr", text + "\n")
        self._rate_limiter.drain()

    def write(self, stream: str, text: str) -> None:
        """Show text that does not come from a rank, without a label."""
        if text:
            self._close_tail()
            self._rate_limiter.write(stream, text)

    def finish(self) -> None:
        """Show all remaining output, and end the last line, because the cell is over."""
        for (rank, stream), (text, _) in self._partial.items():
            self._add_line(rank, stream, text, 0.0)
        self._partial.clear()
        self._emit(self._take(float("inf"), ()))
        self._update_tail(float("inf"))
        self._unfinished.refresh(float("inf"))
        self._unfinished.close()
        self._tail = None
        self._open_rows.close()
        for rank in self._replaces:
            self._drop_cleared(rank)
        if self._hidden or self._hidden_displays:
            self._tell_hidden()
        self._rate_limiter.drain(self._is_stopped)

    # ---- lines

    def _take(self, now: float, talking: Collection[int]) -> list[Folded]:
        self._open_rows.close_until(now)
        entries = self._fold.take(now, talking, self._join)
        self._open_rows.show()
        return entries

    def _join(self, rank: int, item: Item) -> bool:
        """Add an item of a late rank to the lines or displays shown last. Return whether it was added."""
        if self._tail is not None and self._tail.join(rank, item):
            self._open_rows.pass_by([rank])  # the rank now has a line below the rows
            return True
        return self._open_rows.join(rank, item)

    def _count(self, chars: int) -> None:
        self._received_chars += chars
        self._received_lines += 1
        self._cost += chars + _LINE_CHARS
        self._new_lines += 1

    def _add_line(self, rank: int, stream: str, line: str, now: float) -> None:
        line = visible(line)
        self._count(len(line) + 1)
        if not self._unfinished.end_line(rank, stream, line):
            self._fold.add(rank, Item.line(stream, line), now)

    def _emit(self, entries: list[Folded], now: float = 0.0, talking: Collection[int] = ()) -> None:
        entries = self._put_between(entries, now)
        if not entries:
            return
        tail = self._new_tail(entries, now, talking)
        if self._tail is not None and self._goes_on(tail, entries, now):
            self._tail.extend(entries)
            self._tail.changed = True
            self._note_shown(entries)
            return
        self._close_tail()
        at, end = 0, len(entries) - len(tail)
        while at < end:
            entry = entries[at]
            count = 1
            if entry.item.display is None:
                self._rate_limiter.write(entry.item.stream, labelled(entry.ranks, entry.item.text) + "\n")
            elif _is_clear(entry.item.display):
                self._clear(entry.ranks, entry.item.display.content)
            elif entry.item.is_display and _handle(entry.item.display) is None:
                row = _one_row(entries[at:end])
                count = len(row)
                self._show_row(row, now, talking)
            else:
                self._show_display(entry.ranks[0], entry.item.display)
                self._open_rows.pass_by(entry.ranks)
            self._note_shown(entries[at : at + count])
            at += count
        if tail:
            shown_above = {rank for entry in entries[:end] for rank in entry.ranks}
            self._tail, self._tail_id, self._tail_updated_s = Tail(in_time=shown_above), new_id(), now
            self._tail.extend(tail)
            self._tail_began_s = self._tail_late_s = now
            self._rate_limiter.show(_plain(tail), display_id=self._tail_id)
            self._note_shown(tail)

    def _note_shown(self, entries: list[Folded]) -> None:
        """Record that these ranks now have output below earlier output."""
        for entry in entries:
            self._chars += len(entry.item.text) + 1
            self._sent_bytes += len(entry.item.text) + _LABEL_BYTES
            if not entry.item.is_display:
                self._open_rows.pass_by(entry.ranks)
            self._unfinished.pass_by(entry.ranks)

    def _put_between(self, entries: list[Folded], now: float) -> list[Folded]:
        """Insert lines of late ranks between those that were shown last. Return the other entries."""
        if self._tail is None or now - self._tail_late_s > _LATE_S:
            return entries
        chars = sum(len(entry.item.text) + LONGEST_LABEL for entry in self._tail.entries)
        for number, entry in enumerate(entries):
            chars += len(entry.item.text) + LONGEST_LABEL
            is_line = entry.item.display is None and entry.item.stream == "stdout"
            if not is_line or chars > _TAIL_CHARS or not self._tail.insert(entry):
                return entries[number:]
            self._tail_late_s = now
            self._note_shown([entry])
        return []

    def _new_tail(self, entries: list[Folded], now: float, talking: Collection[int]) -> list[Folded]:
        """Return the last lines, if other ranks may still write them and the front end can update its output.

        Lines of stderr are never part of the tail. JupyterLab shows a display with the MIME type of stderr in red.
        Exported HTML and other readers of a saved notebook treat it as plain text.
        """
        if not self._rate_limiter.can_change_text or not talking or now < self._no_tail_until_s:
            return []
        tail: list[Folded] = []
        chars = 0
        for entry in reversed(entries):
            chars += len(entry.item.text) + LONGEST_LABEL
            is_open = bool(set(talking) - set(entry.ranks))
            if entry.item.display is not None or entry.item.stream != "stdout" or not is_open or chars > _TAIL_CHARS:
                break
            tail.insert(0, entry)
        return tail

    def _goes_on(self, tail: list[Folded], entries: list[Folded], now: float) -> bool:
        """Return whether these lines continue the current tail: a burst of lines that was split by chance."""
        assert self._tail is not None
        chars = sum(len(entry.item.text) + LONGEST_LABEL for entry in [*self._tail.entries, *entries])
        return len(tail) == len(entries) and chars < _TAIL_CHARS and now - self._tail_began_s < UPDATE_S

    def _close_tail(self) -> None:
        if self._tail is None:
            return
        self._update_tail(float("inf"))
        tail, self._tail = self._tail, None
        if tail.joined:
            self._no_tail_for_s = 1.0
        else:
            self._no_tail_until_s = time.monotonic() + self._no_tail_for_s
            self._no_tail_for_s = min(_LONGEST_PAUSE_S, 2 * self._no_tail_for_s)

    def _update_tail(self, now: float) -> float | None:
        if self._tail is None or not self._tail.changed:
            return None
        if (wait_s := self._tail_updated_s + UPDATE_S - now) > 0:
            return wait_s
        self._tail.changed = False
        self._tail_updated_s = now if now != float("inf") else 0.0
        self._rate_limiter.update(_plain(self._tail.entries), None, self._tail_id)
        return None

    def _update_unfinished(self, now: float) -> float | None:
        """Show lines that have not ended for some time: progress bars, dots, prompts."""
        soonest: float | None = None
        for (rank, stream), (text, since) in self._partial.items():
            if (wait_s := since + _PARTIAL_LINE_S - now) > 0:
                soonest = wait_s if soonest is None else min(soonest, wait_s)
            elif self._rate_limiter.can_change_text and len(text) <= MOST_CHARS_OF_RANK:
                self._unfinished.set_line(rank, stream, visible(text))
        waits = [wait for wait in (soonest, self._unfinished.refresh(now)) if wait is not None]
        return min(waits, default=None)

    # ---- displays

    def _on_display(self, rank: int, display: Display, now: float) -> None:
        for stream in ("stdout", "stderr"):
            if (rank, stream) in self._partial:
                self._add_line(rank, stream, self._partial.pop((rank, stream))[0], now)
        if _is_clear(display):
            self._unfinished.clear(rank)
            if self._rate_limiter.can_update:
                wait, inside = (bool(display.content.get(name)) for name in ("wait", "inside"))
                self._fold.add(rank, Item(f"clear:{wait}:{inside}", display=display), now)
            return
        data: dict[str, Any] = display.content.get("data") or {}
        has_handle = (display.content.get("transient") or {}).get("display_id") is not None
        if (set(data) == {"text/plain"} and not has_handle) or not self._rate_limiter.can_update:
            text = data.get("text/plain", "a display without text")
            if not data or _is_update(display):
                return
            if self._is_flood():
                self._hide(rank, text + "\n")
                return
            self._count(len(text) + 1)
            if not self._unfinished.end_line(rank, "stdout", text):
                is_value = display.msg_type == "execute_result"
                self._fold.add(rank, Item.value(text) if is_value else Item.line("stdout", text), now)
            return
        if data:
            self._fold.add(rank, Item.displayed(rank, display), now)

    def _clear(self, ranks: list[int], content: Mapping[str, Any]) -> None:
        """Clear the output of these ranks.

        If all ranks clear all of it, it is removed, unless a note or a view of this package is below the cell.
        Otherwise lines stay, and the next displays replace the last ones.
        """
        is_whole = len(ranks) == len(self._ranks) and not content.get("inside")
        has_ours = self._has_notes or self.card.is_shown or not self._may_clear()
        if is_whole and not has_ours and not self._hidden:
            if self._rate_limiter.has_shown:
                self._rate_limiter.clear(bool(content.get("wait")))
            self._unfinished.cleared()
            self._rows.clear()
            self._cleared.clear()
            self._replaces.clear()
            self._open_rows.close()
            self._chars = self._display_chars = self._sent_bytes = 0
            return
        for rank in ranks:
            if rank in self._replaces:
                self._drop_cleared(rank)
                self._replaces.discard(rank)
            self._cleared.setdefault(rank, []).extend(self._rows.pop(rank, []))
        self._open_rows.pass_by(ranks)

    def _drop_cleared(self, rank: int) -> None:
        """Remove rows that a rank has cleared and not replaced."""
        for row in self._cleared.pop(rank, []):
            row.remove(rank)

    def _show_row(self, entries: list[Folded], now: float, talking: Collection[int]) -> None:
        """Show displays of several ranks, in the order of the ranks."""
        shown: list[Row] = []
        for entry in entries:
            assert entry.item.display is not None
            data, metadata = _bundle(entry.item.display)
            row = self._replaced(entry.ranks, data)
            if row is None and self._display_chars > _MOST_DISPLAY_CHARS:
                self._hidden_displays += 1
                continue
            if row is None:
                self._display_chars += sum(len(str(value)) for value in data.values())
                row = (
                    shown[-1]
                    if shown and shown[-1].takes(entry.ranks, data)
                    else Row(self._rate_limiter, self._is_grid)
                )
                if row not in shown:
                    shown.append(row)
                row.put(entry.ranks, data, metadata)
                self._note_row(entry.ranks, row)
            else:
                row.put(entry.ranks, data, metadata)
                row.show()
        for row in shown:
            row.show()
        if not shown:  # they have replaced others, and a late rank still has its slot next to those
            return
        if len(shown) > 1 or not self._rate_limiter.can_update:
            self._open_rows.close()
            return
        for entry in entries:
            self._open_rows.pass_by(entry.ranks)
        others = set(talking).difference(*(entry.ranks for entry in entries))
        self._open_rows.add(OpenRow(shown[0], others, now + _OPEN_ROW_S, self._note_row, self._cleared))

    def _replaced(self, ranks: list[int], data: dict[str, Any]) -> Row | None:
        """Return the row in which this display replaces one that these ranks have cleared."""
        rows = {rank: self._cleared[rank][0] for rank in ranks if self._cleared.get(rank)}
        self._replaces.update(ranks)
        if not rows:
            return None
        row = next(iter(rows.values()))
        if not row.takes(ranks, data):
            return None
        for rank, cleared in rows.items():
            del self._cleared[rank][0]
            if cleared is not row:
                cleared.remove(rank)
        self._note_row(ranks, row)
        return row

    def _note_row(self, ranks: Sequence[int], row: Row) -> None:
        for rank in ranks:
            self._rows.setdefault(rank, []).append(row)

    def _show_display(self, rank: int, display: Display) -> None:
        """Show or update a display with a handle, by which its rank updates it."""
        handle = _handle(display)
        assert handle is not None
        display_id = display_id_of(rank, handle)
        data, metadata = _bundle(display)
        if _is_update(display):
            self._rate_limiter.update(data, metadata, display_id)
        elif self._display_chars > _MOST_DISPLAY_CHARS:
            self._hidden_displays += 1
        else:
            self._display_chars += sum(len(str(value)) for value in data.values())
            row = Row(self._rate_limiter, handle=display_id)
            row.put([rank], data, metadata)
            row.show()
            self._note_row([rank], row)

    # ---- floods

    def _hide(self, rank: int, text: str) -> None:
        self._hidden[rank] = self._hidden.get(rank, 0) + len(text)
        kept = self._last_lines.setdefault(rank, deque([""], maxlen=_LAST_LINES))
        first, *lines = text.rsplit("\n", _LAST_LINES)
        kept[-1] = (kept[-1] + first)[-_TAIL_CHARS:].rpartition("\n")[2]
        kept.extend(line[-_TAIL_CHARS:] for line in lines)

    def _tell_hidden(self) -> None:
        """Report the size of a flood's dropped output, and show its end."""
        parts = [f"{size(chars)} of rank {rank}" for rank, chars in sorted(self._hidden.items())]
        if len(parts) > 4:
            parts = [f"{size(sum(self._hidden.values()))} of {len(parts)} ranks"]
        if self._hidden_displays:
            parts.append(f"{self._hidden_displays} displays")
        where = f"; {self._log} has the text" if self._hidden else ""
        self._rate_limiter.write("stderr", f"... not shown: {', '.join(parts)}{where}\n")
        for rank, lines in self._last_lines.items():
            for line in lines:
                if line:
                    self._fold.add(rank, Item.line("stdout", visible(line)), 0.0)
        for entry in self._fold.take_all():
            self._rate_limiter.write("stdout", labelled(entry.ranks, entry.item.text) + "\n")
        self._hidden.clear()
        self._last_lines.clear()
        self._hidden_displays = 0


def _is_clear(display: Display | None) -> bool:
    return display is not None and display.msg_type == "clear_output"


def _is_update(display: Display | None) -> bool:
    return display is not None and display.msg_type == "update_display_data"


def _bundle(display: Display) -> Bundle:
    return display.content["data"], display.content.get("metadata") or {}


def _handle(display: Display) -> str | None:
    handle: str | None = (display.content.get("transient") or {}).get("display_id")
    return handle


def _one_row(entries: list[Folded]) -> list[Folded]:
    """Return the longest prefix of these entries with displays of different ranks."""
    row: list[Folded] = []
    ranks: set[int] = set()
    for entry in entries:
        display = entry.item.display
        is_new = display is not None and entry.item.is_display and _handle(display) is None
        if not is_new or not ranks.isdisjoint(entry.ranks):
            break
        row.append(entry)
        ranks.update(entry.ranks)
    return row


def _plain(entries: list[Folded]) -> dict[str, Any]:
    return {"text/plain": "\n".join(labelled(entry.ranks, entry.item.text) for entry in entries)}


def display_id_of(rank: int, handle: str) -> str:
    """Return the notebook's id of a display that has a handle on a rank."""
    return f"rank{rank}-{handle}"
