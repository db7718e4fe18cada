"""The bytes of one pipe of a rank, cut into the text of each cell by the marks that the rank wrote."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """Text of a cell (0: written between cells), or with `ends` the end of its text in this pipe."""

    cell: int
    text: str = ""
    ends: bool = False


class TextSplitter:
    """Cuts one pipe's stream. Marks and characters may be split across reads.

    Args:
        token: the session's mark token.

    Example:
        >>> from ddp_notebook.rank.streams import mark
        >>> splitter = TextSplitter("ab12")
        >>> list(splitter.feed(mark("ab12", 7, True) + b"hel")), list(splitter.feed(b"lo" + mark("ab12", 7, False)))
        ([Piece(cell=7, text='hel', ends=False)], [Piece(cell=7, text='lo', ends=False), Piece(cell=7, text='', ends=True)])
    """

    def __init__(self, token: str) -> None:
        self.cell = 0
        self._mark = re.compile(rb"\x1e" + token.encode() + rb"([<>])(\d+)\x1e\n")
        self._begin_of_mark = b"\x1e" + token.encode()
        self._held = b""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> Iterator[Piece]:
        """The pieces that these bytes complete."""
        data = self._held + data
        at = 0
        for mark in self._mark.finditer(data):
            yield from self._text(data[at : mark.start()])
            at = mark.end()
            if mark[1] == b"<":
                self.cell = int(mark[2])
            else:
                yield Piece(int(mark[2]), ends=True)
                self.cell = 0
        keep = self._unfinished_mark(data, at)
        self._held = data[keep:]
        yield from self._text(data[at:keep])

    def _text(self, data: bytes) -> Iterator[Piece]:
        text = self._decoder.decode(data)
        if text:
            yield Piece(self.cell, text)

    def _unfinished_mark(self, data: bytes, at: int) -> int:
        """Where a mark begins that the data does not complete; the data's end if there is none."""
        last = data.rfind(b"\x1e", max(at, len(data) - 64))
        if last < 0:
            return len(data)
        if data[last:] == b"\x1e":  # the begin of a mark, or the end of one whose newline is missing
            before = data.rfind(b"\x1e", max(at, last - 64), last)
            if before >= 0 and data.startswith(self._begin_of_mark, before):
                return before
        rest = data[last:]
        could_be = rest.startswith(self._begin_of_mark) or self._begin_of_mark.startswith(rest)
        return last if could_be else len(data)
