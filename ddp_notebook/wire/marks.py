"""Marks in the text of a rank: end of a cell, position of a display, change between stdout and stderr.

    \\x1e TOKEN : CELL : [MICROSECONDS] \\x1e \\n    end of a cell's text; a duration means that the cell succeeded
    \\x1e TOKEN : d DISPLAY : \\x1e \\n             position of a display, by its number
    \\x1e TOKEN : s NUMBER : \\x1e \\n              change between stdout and stderr, written to both pipes

TOKEN is a secret of the session. A mark is shorter than PIPE_BUF, so it is written atomically. The host server merges
the text of both pipes at the change marks and removes these marks (`launch.host.pipes`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import re

_LONGEST = 64  # upper bound of the bytes of a mark
# Patterns for the marks of any session.
_CELL_END = re.compile(rb"\x1e[0-9a-f]+:\d+:\d*\x1e\n")
_PLACE = re.compile(rb"\x1e[0-9a-f]+:d\d+:\x1e\n")
_KINDS = b"ds"  # letters that distinguish the kinds of marks


@dataclass(frozen=True, slots=True)
class CellEnd:
    """End of a cell's text.

    A mark with a duration also reports that the cell succeeded and sends nothing else. Most cells show only text. For
    them the mark saves one message per rank, a third of the time of `pass` with four ranks.
    """

    cell: int
    duration_s: float | None = None

    def encode(self, token: str) -> bytes:
        duration = "" if self.duration_s is None else round(self.duration_s * 1e6)
        return f"\x1e{token}:{self.cell}:{duration}\x1e\n".encode()


@dataclass(frozen=True, slots=True)
class DisplayMark:
    """Position of a display in the text. The display with this number arrives over ZeroMQ."""

    number: int

    def encode(self, token: str) -> bytes:
        return f"\x1e{token}:d{self.number}:\x1e\n".encode()


@dataclass(frozen=True, slots=True)
class Change:
    """Change between stdout and stderr. The same mark is written to both pipes.

    Text before the mark in either pipe was written before all text after the mark in the other pipe.
    """

    number: int

    def encode(self, token: str) -> bytes:
        return f"\x1e{token}:s{self.number}:\x1e\n".encode()


Mark = CellEnd | DisplayMark | Change


class MarkReader:
    """Finds the marks of one session in text.

    Args:
        token: mark token of the session.

    Example:
        >>> reader = MarkReader("ab12")
        >>> data = b"hello" + CellEnd(7).encode("ab12") + b"later"
        >>> [(data[:start], mark, data[end:]) for start, end, mark in reader.find(data)]
        [(b'hello', CellEnd(cell=7, duration_s=None), b'later')]
    """

    def __init__(self, token: str) -> None:
        self._mark = re.compile(rb"\x1e" + token.encode() + rb":([" + _KINDS + rb"]?)(\d+):(\d*)\x1e\n")
        begun = token.encode() + rb"(:[" + _KINDS + rb"\d:]*(\x1e)?)?"
        self._unfinished = re.compile(rb"\x1e(" + begun + rb"|[^\x1e]{0,15})$")
        self._begin = b"\x1e" + token.encode()

    def find(self, data: bytes) -> Iterator[tuple[int, int, Mark]]:
        """Yield (start, end, mark) for each mark in `data`."""
        for found in self._mark.finditer(data):
            number = int(found[2])
            mark: Mark = CellEnd(number, int(found[3]) / 1e6 if found[3] else None)
            if found[1]:
                mark = DisplayMark(number) if found[1] == b"d" else Change(number)
            yield found.start(), found.end(), mark

    def complete_until(self, data: bytes, at: int) -> int:
        """Return the offset at which an incomplete mark starts; the length of `data` if there is none.

        Args:
            data: text of a pipe.
            at: end of the last complete mark in it.
        """
        found = self._unfinished.search(data, max(at, len(data) - _LONGEST))
        if found is None:
            return len(data)
        start = found.start()
        tail = data[start:]
        return start if tail.startswith(self._begin) or self._begin.startswith(tail) else len(data)


def since_last_cell(data: bytes) -> tuple[bytes, bool]:
    """Return the text after the last end of a cell, without marks, and whether there was such an end.

    Example:
        >>> since_last_cell(b"before" + CellEnd(7).encode("ab12") + b"behind")
        (b'behind', True)
    """
    if b"\x1e" not in data:
        return data, False
    if _CELL_END.fullmatch(data):  # the usual case
        return b"", True
    data = _PLACE.sub(b"", data)
    ends = list(_CELL_END.finditer(data))
    return (data[ends[-1].end() :], True) if ends else (data, False)
