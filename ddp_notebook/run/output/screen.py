"""Output of a cell's ranks in the notebook: live, folded, each line labelled with the ranks that it comes from.

    [0-3] epoch 1
    [0] loss 0.51
    [1-3] loss 0.48

All text goes out as text: nothing that a rank prints is taken as markup.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ddp_notebook.run.cells.cell import Shown
from ddp_notebook.run.output.card import STOP, Card
from ddp_notebook.run.output.fold import Fold, Folded, Item, Tail, waits_s
from ddp_notebook.run.output.labels import LONGEST_LABEL, labelled
from ddp_notebook.run.output.lines import pieces, redrawn, visible
from ddp_notebook.run.output.outlet import Outlet, new_id
from ddp_notebook.run.output.sink import Sink
from ddp_notebook.run.output.unfinished import UPDATE_S, Unfinished
from ddp_notebook.wire.events import Display

_PARTIAL_LINE_S = 0.1  # a line without its end is shown after so long
_TAIL_CHARS = 4000  # of lines that may be shown again with another label
_MOST_CHARS = 5_000_000  # of a cell's text that are shown, without labels; more is a flood
_MOST_SENT_BYTES = 10_000_000  # of text, with its labels
_MOST_DISPLAY_CHARS = 5_000_000  # of displays that do not replace another one
_LABEL_BYTES = 8  # of a line on iopub: its label and its end
_HURRY_CHARS = 20_000  # still shown after stop was pressed
_LINE_CHARS = 20  # each line counts so many besides its text
_MOST_LINES = 2000  # more are not added before the next refresh: until then no press is noticed
_LAST_LINES = 10  # of a flood, from each rank
_LONGEST_PAUSE_S = 64.0


class Screen:
    """Shows what comes from the ranks of one cell.

    Args:
        ranks: the ranks that run it.
        sink: where it goes; None: where the output of this thread goes.
        ends: what ends the cell, for the hang card.
        is_stopped: tells whether somebody has pressed stop while the rest of a cell that is over is shown.
        may_clear: tells whether nothing else stands under the cell that its ranks may not clear away.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        sink: Sink | None = None,
        ends: str = STOP,
        is_stopped: Callable[[], bool] = lambda: False,
        may_clear: Callable[[], bool] = lambda: True,
    ) -> None:
        self._ranks = ranks
        self._may_clear = may_clear
        self._outlet = Outlet(sink)
        self._is_stopped = is_stopped
        self.card = Card(self._outlet, ends)
        self._fold = Fold()
        self._partial: dict[tuple[int, str], tuple[str, float]] = {}  # (rank, stream) -> text, since when
        self._unfinished = Unfinished(self._outlet)
        self._tail: Tail | None = None
        self._tail_id = ""
        self._tail_updated_s = 0.0
        self._tail_began_s = 0.0
        self._no_tail_until_s = 0.0
        self._no_tail_for_s = 1.0  # doubled each time that no rank has joined a tail: displays are expensive
        self._slots: dict[int, list[str]] = {}  # by rank: ids of its displays
        self._reuse: dict[int, list[str]] = {}  # by rank: ids of the displays that it has cleared
        self._display_of_tail = ""
        self._has_notes = False  # which ranks may not clear away
        self._chars = self._display_chars = 0  # shown
        self._sent_bytes = 0  # of text, estimated
        self._received_chars = 0  # of text, before it is folded
        self._cost = 0  # the time of handling it, in characters
        self._hurries_at = float("inf")
        self._new_lines = 0  # since the last refresh
        self._most_received_chars = _MOST_CHARS * min(8, len(ranks))
        self._hidden: dict[int, int] = {}  # characters of a flood that were not shown
        self._hidden_displays = 0
        self._last_lines: dict[int, deque[str]] = {}

    # ---- input

    def show(self, item: Shown) -> None:
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
        """Show text that ranks wrote while no cell ran, by rank and stream."""
        self._has_notes |= bool(texts)
        for (rank, stream), text in texts.items():
            for line in text.splitlines():
                self._fold.add(rank, Item.line(stream, f"(between cells) {visible(line)}"), 0.0)
        self._emit(self._fold.take_all())

    def refresh(self, talking: Collection[int]) -> float | None:
        """Bring to the front end what may be shown now. Returns seconds until the next call; None: no further call.

        Args:
            talking: ranks from which more can come.
        """
        now = time.monotonic()
        self._new_lines = 0
        self._emit(self._take(now, talking), now, talking)
        waits = [self._fold.wait_s(now), self._update_tail(now), self._update_unfinished(now), self._outlet.flush(now)]
        return min((wait_s for wait_s in waits if wait_s is not None), default=None)

    def hurry(self) -> None:
        """Stop was pressed: show what is there, and only the end of a flood."""
        self._hurries_at = self._cost + _HURRY_CHARS
        self._outlet.hurry()

    @property
    def is_full(self) -> bool:
        """True if more displays wait than the front end takes now, so that the ranks have to wait."""
        return self._outlet.is_full

    @property
    def is_due(self) -> bool:
        """True if the lines that have come should be shown before more are taken."""
        return self._new_lines > _MOST_LINES

    def _is_flood(self) -> bool:
        return (
            self._chars > _MOST_CHARS
            or self._sent_bytes > _MOST_SENT_BYTES
            or self._received_chars > self._most_received_chars
            or self._cost > self._hurries_at
        )

    def note(self, text: str) -> None:
        """Show a line of our own."""
        self.finish()
        self._has_notes = True
        self._outlet.write("stderr", text + "\n")
        self._outlet.drain()

    def finish(self) -> None:
        """The cell is over: show all that is left, and end the last line."""
        for (rank, stream), (text, _) in self._partial.items():
            self._add_line(rank, stream, text, 0.0)
        self._partial.clear()
        self._emit(self._take(float("inf"), ()))
        self._update_tail(float("inf"))
        self._unfinished.refresh(float("inf"))
        self._unfinished.close()
        self._tail = None
        if self._hidden or self._hidden_displays:
            self._tell_hidden()
        self._outlet.drain(self._is_stopped)

    # ---- lines

    def _take(self, now: float, talking: Collection[int]) -> list[Folded]:
        entries = self._fold.take(now, talking, self._tail)
        if self._tail is not None and self._tail.changed and (last := self._tail.entries[-1]).item.display is not None:
            for rank in last.ranks:
                if self._display_of_tail not in self._slots.setdefault(rank, []):
                    self._slots[rank].append(self._display_of_tail)
        return entries

    def _count(self, chars: int) -> None:
        self._received_chars += chars
        self._cost += chars + _LINE_CHARS
        self._new_lines += 1

    def _add_line(self, rank: int, stream: str, line: str, now: float) -> None:
        line = visible(line)
        self._count(len(line) + 1)
        if not self._unfinished.end_line(rank, stream, line):
            self._fold.add(rank, Item.line(stream, line), now)

    def _emit(self, entries: list[Folded], now: float = 0.0, talking: Collection[int] = ()) -> None:
        if not entries:
            return
        tail = self._new_tail(entries, now, talking)
        if self._tail is not None and self._goes_on(tail, entries, now):
            self._tail.extend(entries)
            self._tail.changed = True
            return
        self._close_tail()
        for entry in entries:
            self._chars += len(entry.item.text) + 1
            self._sent_bytes += len(entry.item.text) + _LABEL_BYTES
        for entry in entries[: len(entries) - len(tail)]:
            if entry.item.display is None:
                self._outlet.write(entry.item.stream, labelled(entry.ranks, entry.item.text) + "\n")
            elif _is_clear(entry.item.display):
                self._clear(entry.ranks, entry.item.display.content)
            else:
                self._show_display(entry, entry.item.display)
        if tail:
            self._tail, self._tail_id, self._tail_updated_s = Tail(), new_id(), now
            self._tail.extend(tail)
            self._tail_began_s = now
            self._outlet.show(_plain(tail), display_id=self._tail_id)
            if tail[-1].item.display is not None:
                self._show_display(tail[-1], tail[-1].item.display, is_labelled=True)

    def _new_tail(self, entries: list[Folded], now: float, talking: Collection[int]) -> list[Folded]:
        """The last entries, if other ranks may still write them and the front end can change what it shows."""
        if not self._outlet.can_update or not talking:
            return []
        last = entries[-1]
        if last.item.display is not None:
            is_new = last.item.display.msg_type in ("display_data", "execute_result")
            cleared = {rank for entry in entries if _is_clear(entry.item.display) for rank in entry.ranks}
            has_place = not cleared.isdisjoint(last.ranks) or self._reused_id(last.ranks)
            is_open = is_new and set(talking) - set(last.ranks) and not has_place
            return [last] if is_open else []
        if now < self._no_tail_until_s:
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
        """Whether these lines continue the tail of a moment ago: lines of one burst that were cut by chance."""
        assert self._tail is not None
        chars = sum(len(entry.item.text) + LONGEST_LABEL for entry in [*self._tail.entries, *entries])
        plain = self._tail.entries[-1].item.display is None and len(tail) == len(entries)
        return plain and chars < _TAIL_CHARS and now - self._tail_began_s < UPDATE_S

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
        self._outlet.update(_plain(self._tail.entries), None, self._tail_id)
        return None

    def _update_unfinished(self, now: float) -> float | None:
        """Show lines that have not ended for a while: bars that are redrawn, dots, questions."""
        soonest: float | None = None
        for (rank, stream), (text, since) in self._partial.items():
            if (wait_s := since + _PARTIAL_LINE_S - now) > 0:
                soonest = wait_s if soonest is None else min(soonest, wait_s)
            elif self._outlet.can_update:
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
            if self._outlet.can_update:
                wait, inside = (bool(display.content.get(name)) for name in ("wait", "inside"))
                self._fold.add(rank, Item(f"clear:{wait}:{inside}", display=display), now)
            return
        data: dict[str, Any] = display.content.get("data") or {}
        has_handle = (display.content.get("transient") or {}).get("display_id") is not None
        if (set(data) == {"text/plain"} and not has_handle) or not self._outlet.can_update:
            text = data.get("text/plain", "a display without text")
            if not data or _is_update(display):
                return
            if self._is_flood():
                self._hide(rank, text + "\n")
                return
            self._count(len(text) + 1)
            if not self._unfinished.end_line(rank, "stdout", text):
                self._fold.add(rank, Item.line("stdout", text, waits_s(display)), now)
            return
        if data:
            self._fold.add(rank, Item.displayed(rank, display), now)

    def _clear(self, ranks: list[int], content: Mapping[str, Any]) -> None:
        """These ranks clear their output. What all of them clear is gone, unless something of ours stands there too;
        else lines stay, and the next displays take the places of the last ones."""
        is_whole = len(ranks) == len(self._ranks) and not content.get("inside")
        has_ours = self._has_notes or self.card.is_shown or not self._may_clear()
        if is_whole and not has_ours and not self._hidden:
            if self._outlet.has_shown:
                self._outlet.clear(bool(content.get("wait")))
            self._unfinished.cleared()
            self._slots.clear()
            self._reuse.clear()
            self._chars = self._display_chars = self._sent_bytes = 0
        else:
            self._reuse |= {rank: self._slots.pop(rank, []) for rank in ranks}

    def _show_display(self, entry: Folded, display: Display, is_labelled: bool = False) -> None:
        content, ranks = display.content, entry.ranks
        data, metadata = content["data"], content.get("metadata") or {}
        handle = (content.get("transient") or {}).get("display_id")
        if handle is not None and display.msg_type == "update_display_data":
            self._outlet.update(data, metadata, display_id_of(ranks[0], handle))
            return
        display_id = self._reused_id(ranks) if handle is None else None
        if display_id is not None:
            for left in self._reuse.values():
                if display_id in left:
                    left.remove(display_id)
            self._outlet.update(data, metadata, display_id)
        elif self._display_chars > _MOST_DISPLAY_CHARS:
            self._hidden_displays += 1
            return
        else:
            display_id = new_id() if handle is None else display_id_of(ranks[0], handle)
            self._display_chars += sum(len(str(value)) for value in data.values())
            if not is_labelled:
                self._outlet.write("stdout", labelled(entry.ranks, entry.item.text) + "\n")
            self._outlet.show(data, metadata, display_id)
        self._display_of_tail = display_id
        for rank in ranks:
            self._slots.setdefault(rank, []).append(display_id)

    def _reused_id(self, ranks: list[int]) -> str | None:
        """The display that these ranks have cleared and that the next one is to replace, if they share it."""
        firsts = {self._reuse[rank][0] if self._reuse.get(rank) else None for rank in ranks}
        return firsts.pop() if len(firsts) == 1 else None

    # ---- floods

    def _hide(self, rank: int, text: str) -> None:
        self._hidden[rank] = self._hidden.get(rank, 0) + len(text)
        kept = self._last_lines.setdefault(rank, deque([""], maxlen=_LAST_LINES))
        first, *lines = text.rsplit("\n", _LAST_LINES)
        kept[-1] = (kept[-1] + first)[-_TAIL_CHARS:].rpartition("\n")[2]
        kept.extend(line[-_TAIL_CHARS:] for line in lines)

    def _tell_hidden(self) -> None:
        """Say how much of a flood is missing, and show its end."""
        parts = [f"{chars / 1e6:.1f} MB of rank {rank}" for rank, chars in sorted(self._hidden.items())]
        if len(parts) > 4:
            parts = [f"{sum(self._hidden.values()) / 1e6:.1f} MB of {len(parts)} ranks"]
        if self._hidden_displays:
            parts.append(f"{self._hidden_displays} displays")
        where = "; session.log(rank) has the text" if self._hidden else ""
        self._outlet.write("stderr", f"... not shown: {', '.join(parts)}{where}\n")
        for rank, lines in self._last_lines.items():
            for line in lines:
                if line:
                    self._fold.add(rank, Item.line("stdout", visible(line)), 0.0)
        for entry in self._fold.take_all():
            self._outlet.write("stdout", labelled(entry.ranks, entry.item.text) + "\n")
        self._hidden.clear()
        self._last_lines.clear()
        self._hidden_displays = 0


def _is_clear(display: Display | None) -> bool:
    return display is not None and display.msg_type == "clear_output"


def _is_update(display: Display | None) -> bool:
    return display is not None and display.msg_type == "update_display_data"


def _plain(entries: list[Folded]) -> dict[str, Any]:
    return {"text/plain": "\n".join(labelled(entry.ranks, entry.item.text) for entry in entries)}


def display_id_of(rank: int, handle: str) -> str:
    """The notebook's id for a display that has a handle on a rank."""
    return f"rank{rank}-{handle}"
