"""Split the text of a rank's pipes at its marks, and order it with the displays that arrive over ZeroMQ."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterator

from ddp_notebook.messages.ranks import Display, InputRequest
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.wire.marks import CellEnd, DisplayMark, Mark, MarkReader

Piece = str | Mark
Placed = Display | InputRequest  # messages with a place in the text


class TextSplitter:
    """Splits the stream of one pipe into text and marks.

    The parts are text (`str`), ends of cells (`CellEnd`) and positions of displays (`DisplayMark`).

    Marks and characters may be split across reads.

    Args:
        token: mark token of the session.

    Example:
        >>> splitter = TextSplitter("ab12")
        >>> stream = b"hello" + CellEnd(7).encode("ab12") + b"later"
        >>> list(splitter.feed(stream[:9])), list(splitter.feed(stream[9:]))
        (['hello'], [CellEnd(cell=7, duration_s=None), 'later'])
    """

    def __init__(self, token: str) -> None:
        self._marks = MarkReader(token)
        self._held = b""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> Iterator[Piece]:
        """Add data of the pipe. Yield the text and marks that are complete now."""
        data = self._held + data
        at = 0
        for start, end, mark in self._marks.find(data):
            yield from self._text(data[at:start], final=isinstance(mark, CellEnd))
            yield mark
            at = end
        end = self._marks.complete_until(data, at)
        self._held = data[end:]
        yield from self._text(data[at:end])

    def _text(self, data: bytes, final: bool = False) -> Iterator[str]:
        """Yield decoded text.

        `final` also flushes an incomplete character, so that it does not leak into the next cell.
        """
        if not data and not final:
            return
        text = self._decoder.decode(data, final)
        if text:
            yield text


class Ordered:
    """Merges the text and displays of one rank in their original order: text waits for the display before it.

    A request of a debugger is ordered like a display.

    Example:
        >>> ordered = Ordered()
        >>> list(ordered.add(1, "a")), list(ordered.add(1, DisplayMark(1))), list(ordered.add(1, "b"))
        ([(1, 'a')], [], [])
        >>> display = Display(cell=1, msg_type="display_data", content={}, place=1)
        >>> list(ordered.arrived(display)) == [(1, display), (1, "b")]
        True
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, Piece]] = deque()
        self._displays: dict[int, Placed] = {}
        self._last_place = 0

    def add(self, fd: int, piece: Piece) -> Iterator[tuple[int, Piece | Placed]]:
        """Add a piece of a pipe. Yield all pieces that can be shown now, as `(fd, piece)`.

        Displays are numbered in the order of their marks. An interrupt may repeat a mark, but its display arrives once.
        A repeated mark is ignored, because text would wait for it forever.
        """
        if isinstance(piece, DisplayMark):
            if piece.number <= self._last_place:
                return
            self._last_place = piece.number
        if not self._waiting and not isinstance(piece, DisplayMark):
            yield fd, piece
            return
        self._waiting.append((fd, piece))
        yield from self._release()

    def arrived(self, display: Placed) -> Iterator[tuple[int, Piece | Placed]]:
        """Add a display that arrived over ZeroMQ. Yield all pieces that can be shown now."""
        self._displays[display.place] = display
        yield from self._release()

    def give_up(self) -> Iterator[tuple[int, Piece | Placed]]:
        """Yield the remaining pieces. Call it when the rank has died, so that no display will arrive."""
        waiting, self._waiting = self._waiting, deque()
        self._last_place = 0
        for fd, piece in waiting:
            if not isinstance(piece, DisplayMark):
                yield fd, piece
            elif piece.number in self._displays:
                yield fd, self._displays.pop(piece.number)

    def _release(self) -> Iterator[tuple[int, Piece | Placed]]:
        while self._waiting:
            fd, piece = self._waiting[0]
            if not isinstance(piece, DisplayMark):
                self._waiting.popleft()
                yield fd, piece
            elif piece.number in self._displays:
                self._waiting.popleft()
                yield fd, self._displays.pop(piece.number)
            else:
                return
