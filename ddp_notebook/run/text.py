"""The bytes of a rank's pipe, cut at the marks that end the text of each cell."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CellEnd:
    """The end of a cell's text. With a duration the cell ended well and nothing else of it is to come."""

    cell: int
    duration_s: float | None = None


class TextSplitter:
    """Cuts one pipe's stream into text (`str`) and the cells that end there (`CellEnd`).

    Marks and characters may be split across reads.

    Args:
        token: the session's mark token.

    Example:
        >>> from ddp_notebook.rank.streams import mark
        >>> splitter = TextSplitter("ab12")
        >>> stream = b"hello" + mark("ab12", 7) + b"later"
        >>> list(splitter.feed(stream[:9])), list(splitter.feed(stream[9:]))
        (['hello'], [CellEnd(cell=7, duration_s=None), 'later'])
    """

    def __init__(self, token: str) -> None:
        self._mark = re.compile(rb"\x1e" + token.encode() + rb":(\d+):(\d*)\x1e\n")
        self._unfinished = re.compile(rb"\x1e(" + token.encode() + rb"(:[\d:]*(\x1e)?)?|[^\x1e]{0,15})$")
        self._begin = b"\x1e" + token.encode()
        self._held = b""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> Iterator[str | CellEnd]:
        """What these bytes complete."""
        data = self._held + data
        at = 0
        for mark in self._mark.finditer(data):
            yield from self._text(data[at : mark.start()], final=True)
            yield CellEnd(int(mark[1]), int(mark[2]) / 1e6 if mark[2] else None)
            at = mark.end()
        end = self._complete_until(data, at)
        self._held = data[end:]
        yield from self._text(data[at:end])

    def _text(self, data: bytes, final: bool = False) -> Iterator[str]:
        """The text; with `final` also what was begun of a character, so that it does not reach the next cell."""
        text = self._decoder.decode(data, final)
        if text:
            yield text

    def _complete_until(self, data: bytes, at: int) -> int:
        """Where a mark begins that the data does not complete; the data's end if there is none."""
        found = self._unfinished.search(data, max(at, len(data) - 64))
        if found is None:
            return len(data)
        start = found.start()
        tail = data[start:]
        return start if tail.startswith(self._begin) or self._begin.startswith(tail) else len(data)
