"""Messages of ranks that the driving notebook has not shown yet.

Text, displays, input requests and ends of cells are kept by rank, in the order of arrival. A shown cell is removed. If
a rank exceeds its limit, its oldest text and displays are dropped and counted. Ends of cells are never dropped.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ddp_notebook.messages.encoding import Message
from ddp_notebook.messages.framing import ProcessText
from ddp_notebook.messages.keeper import RankEnded, RankMessage
from ddp_notebook.messages.ranks import CellDone, Display, InputReply, InputRequest, RunCell
from ddp_notebook.messages.survive_messages import Stalls, Survives
from ddp_notebook.records.units import bundle_chars, size
from ddp_notebook.wire.marks import CellEnd, DisplayMark, Mark, MarkReader

Event = Message | ProcessText  # data sent to a notebook
# Size of an entry without its text or display data, measured with tracemalloc (CPython 3.11, 64 bits).
_TEXT_BYTES, _DISPLAY_BYTES = 220, 1000
_PIECE_BYTES = 4096  # smaller pieces of text are joined


@dataclass(slots=True)
class Cell:
    """A cell that was sent to ranks, and was not shown completely."""

    told: RunCell
    ranks: list[int]
    began_s: float = field(default_factory=time.monotonic)
    open: dict[int, set[str]] = field(default_factory=dict)  # rank -> expected parts
    goes_well: bool = True  # no rank has failed or lost its group

    def close(self, rank: int, *what: str) -> None:
        """Record that parts of the cell have arrived."""
        left = self.open.get(rank)
        if left is not None:
            left.difference_update(what)
            if not left:
                del self.open[rank]

    @property
    def is_over(self) -> bool:
        return not self.open


class _Entry(NamedTuple):
    event: Event | None
    nbytes: int = 0  # size of text or of a display; an entry with 0 is never dropped
    mark: Mark | None = None
    cell: int = 0  # of a message
    place: int = 0  # of a display
    request: int = 0  # number of a request of `input()`
    begins: int = 0  # number of a cell that begins; such an entry has no event

    @property
    def takes_bytes(self) -> int:
        """Approximate memory of the entry; 0 if it is never dropped."""
        return self.nbytes and self.nbytes + (_DISPLAY_BYTES if self.cell else _TEXT_BYTES)


class _OfRank:
    """Entries of one rank."""

    def __init__(self) -> None:
        self.kept: list[_Entry] = []  # entries that were kept when older ones were dropped
        self.entries: deque[_Entry] = deque()
        self.takes_bytes = 0
        self.left_out_bytes = 0
        self.unfinished: dict[int, bytes] = {}  # fd -> a possible start of a mark
        self.survives: Survives | None = None  # the current loop of the rank
        self.stalls: Stalls | None = None  # set while it waits in that loop
        self.without_display: set[int] = set()  # places of dropped displays

    def on_loop(self, message: Survives | Stalls) -> None:
        """Handle a message about a survive loop."""
        if isinstance(message, Stalls):
            self.stalls = message
        else:
            self.survives, self.stalls = (message, self.stalls) if message.line else (None, None)

    def begin_anew(self) -> None:
        """Reset after a new process has got this rank, and runs the cell in which the old one died."""
        self.entries = deque(entry for entry in self.entries if not isinstance(entry.event, RankEnded))
        self.kept = [entry for entry in self.kept if not isinstance(entry.event, RankEnded)]
        self.survives = self.stalls = None

    def add(self, entry: _Entry, limit_bytes: int) -> None:
        self.entries.append(entry)
        self.takes_bytes += entry.takes_bytes
        while self.takes_bytes > limit_bytes and self.entries:
            oldest = self.entries.popleft()
            self.takes_bytes -= oldest.takes_bytes
            self.left_out_bytes += oldest.nbytes
            if oldest.place:  # else the text after its mark would wait for it forever
                self.without_display.add(oldest.place)
            if not oldest.nbytes and not isinstance(oldest.mark, DisplayMark):
                self.kept.append(_without_place(oldest))

    def add_text(self, rank: int, fd: int, data: bytes, limit_bytes: int) -> None:
        last = self.entries[-1].event if self.entries and self.entries[-1].mark is None else None
        if isinstance(last, ProcessText) and last.fd == fd and len(last.data) + len(data) <= _PIECE_BYTES:
            self.takes_bytes -= self.entries.pop().takes_bytes
            data = last.data + data
        self.add(_Entry(ProcessText(rank, fd, data), len(data)), limit_bytes)


class Journal:
    """Journal of one session. The caller must serialise all calls.

    Args:
        token: of the marks in the ranks' text.
        limit_bytes: limit of text and displays per rank.

    Example:
        >>> journal = Journal("ab12", limit_bytes=1000)
        >>> journal.on_told(RunCell(cell=1, code="print(1)", execution_count=1), [0])
        >>> journal.on_text(0, 1, b"1\\n" + CellEnd(1, 0.5).encode("ab12"))
        >>> journal.cells[1].is_over, [event.data for event in journal.events()]
        (True, [b'1\\n', b'\\x1eab12:1:500000\\x1e\\n'])
        >>> journal.on_shown(1)
        >>> journal.cells, list(journal.events())
        ({}, [])
    """

    def __init__(self, token: str, limit_bytes: int) -> None:
        self.cells: dict[int, Cell] = {}
        self.last_cell = 0
        self.busy_until_s = time.monotonic()  # when a cell has run last
        self.went_well = True  # the last cell succeeded
        self._token = token
        self._reader = MarkReader(token)
        self._limit_bytes = limit_bytes
        self._ranks: dict[int, _OfRank] = {}

    @property
    def running(self) -> list[Cell]:
        """Cells that have not ended."""
        return [cell for cell in self.cells.values() if not cell.is_over]

    @property
    def is_in_loop(self) -> bool:
        """True if ranks are in a survive loop."""
        return any(of_rank.survives is not None for of_rank in list(self._ranks.values()))

    def events(self) -> Iterator[Event]:
        """Yield the events that a notebook needs when it attaches."""
        for rank, of_rank in self._ranks.items():
            yield from (_with_rank(entry.event, rank) for entry in of_rank.kept if entry.event is not None)
            if of_rank.left_out_bytes:
                words = f"... {size(of_rank.left_out_bytes)} before this were not kept ...\n"
                yield ProcessText(rank, 1, words.encode())
            for entry in of_rank.entries:
                lost = isinstance(entry.mark, DisplayMark) and entry.mark.number in of_rank.without_display
                if entry.event is not None and not lost:
                    yield _with_rank(entry.event, rank)
            for fd, data in of_rank.unfinished.items():
                if data:
                    yield ProcessText(rank, fd, data)
            loop = (of_rank.survives, of_rank.stalls)
            yield from (RankMessage(rank=rank, message=one) for one in loop if one is not None)

    # ---- what happens

    def on_told(self, cell: RunCell, ranks: list[int], gone: Collection[int] = ()) -> None:
        """Record that a cell was sent to ranks, or again to the new ranks of a survive loop.

        Args:
            cell: the cell.
            ranks: the receivers.
            gone: ranks that have ended without the notebook's knowledge: they send nothing.
        """
        self.last_cell = max(self.last_cell, cell.cell)
        its: dict[int, set[str]] = {rank: {"text", "done"} for rank in ranks if rank not in gone}
        if (known := self.cells.get(cell.cell)) is not None:
            known.open.update(its)
            known.goes_well = len(its) == len(ranks)
            for rank in its:
                self._of(rank).begin_anew()
            return
        self.cells[cell.cell] = new = Cell(cell, ranks, open=its, goes_well=len(its) == len(ranks))
        self._note_end(new)
        for of_rank in self._ranks.values():
            of_rank.entries.append(_Entry(None, begins=cell.cell))

    def on_text(self, rank: int, fd: int, data: bytes) -> None:
        """Record text of a rank."""
        of_rank = self._of(rank)
        data, at = of_rank.unfinished.get(fd, b"") + data, 0
        for start, end, mark in self._reader.find(data):
            self._add_text(of_rank, rank, fd, data[at:start])
            of_rank.add(_Entry(ProcessText(rank, fd, data[start:end]), mark=mark), self._limit_bytes)
            if isinstance(mark, CellEnd) and (cell := self.cells.get(mark.cell)) is not None:
                cell.close(rank, "text", *["done"] * (mark.duration_s is not None))
                self._note_end(cell)
            at = end
        end = self._reader.complete_until(data, at)
        self._add_text(of_rank, rank, fd, data[at:end])
        of_rank.unfinished[fd] = data[end:]

    def _add_text(self, of_rank: _OfRank, rank: int, fd: int, data: bytes) -> None:
        if data:
            of_rank.add_text(rank, fd, data, self._limit_bytes)

    def on_message(self, rank: int, message: Message) -> None:
        """Record a message of a rank from the wire. Messages that belong to no cell are not kept."""
        if isinstance(message, Survives | Stalls):
            self._of(rank).on_loop(message)
        if not isinstance(message, CellDone | Display | InputRequest):
            return
        nbytes, place = 0, 0
        if isinstance(message, Display):
            nbytes, place = max(1, bundle_chars(message.content.get("data") or {})), message.place
        request = 0
        if isinstance(message, InputRequest):
            request, place = message.request, message.place
        self._of(rank).add(
            _Entry(RankMessage(rank=rank, message=message), nbytes, None, message.cell, place, request),
            self._limit_bytes,
        )
        if isinstance(message, CellDone) and (cell := self.cells.get(message.cell)) is not None:
            cell.goes_well &= message.status == "ok" and message.has_group and not message.group
            cell.close(rank, "done")
            self._note_end(cell)

    def on_answered(self, rank: int, answer: InputReply) -> None:
        """Remove an input request that was answered."""
        of_rank = self._of(rank)
        answered = [entry for entry in of_rank.entries if entry.request == answer.request]
        of_rank.without_display.update(entry.place for entry in answered if entry.place)
        of_rank.entries = deque(entry for entry in of_rank.entries if entry.request != answer.request)

    def on_resumed(self, rank: int) -> None:
        """Record that a rank that waited in its loop may continue."""
        self._of(rank).stalls = None

    def on_ended(self, rank: int, event: Event) -> None:
        """Record the end of a rank's process."""
        self._of(rank).add(_Entry(event), self._limit_bytes)
        for cell in self.cells.values():
            cell.goes_well &= rank not in cell.open
            cell.close(rank, "text", "done")
            self._note_end(cell)

    def on_shown(self, number: int) -> None:
        """Remove a completely shown cell, and all cells before it."""
        cell = self.cells.get(number)
        if cell is None or not cell.is_over:
            return
        for rank, of_rank in self._ranks.items():
            entries = [*of_rank.kept, *of_rank.entries]
            behind = 0
            for at, entry in enumerate(entries):
                ends = isinstance(entry.mark, CellEnd) and entry.mark.cell == number
                if ends if rank in cell.ranks else entry.begins == number:
                    behind = at + 1
            left = [entry for entry in entries[behind:] if not 0 < entry.cell <= number]
            of_rank.kept, of_rank.entries = [], deque(left)
            of_rank.takes_bytes = sum(entry.takes_bytes for entry in left)
            of_rank.left_out_bytes = 0
            if of_rank.survives is not None and of_rank.survives.cell <= number:
                of_rank.survives = of_rank.stalls = None
            of_rank.without_display.clear()
        self.cells = {n: one for n, one in self.cells.items() if n > number or not one.is_over}

    def on_renumbered(self, stayed: Mapping[int, int]) -> None:
        """Handle a change of the number of ranks.

        A running cell is a survive loop that continues with fewer ranks. A cell that was abandoned and has ended since
        is removed: the rest of its text is shown above the next cell.

        Args:
            stayed: the former number of each kept rank, by its new one.
        """
        self._ranks = {now: self._of(before) for now, before in stayed.items()}
        self.cells = {number: cell for number, cell in self.cells.items() if not cell.is_over}
        for cell in self.cells.values():
            cell.open = {now: cell.open[before] for now, before in stayed.items() if before in cell.open}
            cell.ranks = [now for now, before in stayed.items() if before in cell.ranks]

    def _note_end(self, cell: Cell) -> None:
        if cell.is_over:
            self.busy_until_s = time.monotonic()
            self.went_well = cell.goes_well

    def _of(self, rank: int) -> _OfRank:
        return self._ranks.setdefault(rank, _OfRank())


def _without_place(entry: _Entry) -> _Entry:
    """Return an entry whose message does not wait for its mark, which may be dropped."""
    if not isinstance(entry.event, RankMessage) or not isinstance(entry.event.message, InputRequest):
        return entry
    request = replace(entry.event.message, place=0)
    return entry._replace(event=replace(entry.event, message=request), place=0)


def _with_rank(event: Event, rank: int) -> Event:
    """Return an event with the current number of its rank."""
    if isinstance(event, ProcessText):
        return event._replace(process=rank)
    return replace(event, rank=rank) if isinstance(event, RankMessage | RankEnded) else event
