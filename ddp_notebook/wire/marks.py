"""The marks that a rank puts into its pipes: the end of a cell's text, the place of a display, a change of the stream.

    \\x1e TOKEN : CELL : [MICROSECONDS] \\x1e \\n    the text of a cell ends; with its duration the cell ended well
    \\x1e TOKEN : d DISPLAY : \\x1e \\n             the place of a display, by its number
    \\x1e TOKEN : s NUMBER : \\x1e \\n              a change from stdout to stderr or back, in both pipes

The token is the session's. A mark is shorter than PIPE_BUF, so it is written whole. The host server puts the text of
both pipes in order by the changes, and removes these marks (`launch.host.pipes`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import re

_LONGEST = 64  # bytes of a mark
# The marks of any session.
_CELL_END = re.compile(rb"\x1e[0-9a-f]+:\d+:\d*\x1e\n")
_PLACE = re.compile(rb"\x1e[0-9a-f]+:d\d+:\x1e\n")
_KINDS = b"ds"  # letters before the number


@dataclass(frozen=True, slots=True)
class CellEnd:
    """The end of a cell's text.

    With a duration it says that the cell ended well and that nothing else of it is to come: most cells show nothing
    but text, and a message less from each of four ranks is a third of the time of `pass` on two cores.
    """

    cell: int
    duration_s: float | None = None

    def encode(self, token: str) -> bytes:
        duration = "" if self.duration_s is None else round(self.duration_s * 1e6)
        return f"\x1e{token}:{self.cell}:{duration}\x1e\n".encode()


@dataclass(frozen=True, slots=True)
class DisplayMark:
    """Where something was displayed: the display of this number comes by the wire."""

    number: int

    def encode(self, token: str) -> bytes:
        return f"\x1e{token}:d{self.number}:\x1e\n".encode()


@dataclass(frozen=True, slots=True)
class Change:
    """A change from one of the streams stdout and stderr to the other. The same mark is in both pipes: text before it
    in either pipe was written before all text after it in the other."""

    number: int

    def encode(self, token: str) -> bytes:
        return f"\x1e{token}:s{self.number}:\x1e\n".encode()


Mark = CellEnd | DisplayMark | Change


class MarkReader:
    """Finds the marks of one session.

    Args:
        token: the session's.

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
        """The marks in these bytes: where each begins and ends, and what it says."""
        for found in self._mark.finditer(data):
            number = int(found[2])
            mark: Mark = CellEnd(number, int(found[3]) / 1e6 if found[3] else None)
            if found[1]:
                mark = DisplayMark(number) if found[1] == b"d" else Change(number)
            yield found.start(), found.end(), mark

    def complete_until(self, data: bytes, at: int) -> int:
        """Where a mark begins that the data does not complete; the data's end if there is none.

        Args:
            at: the end of the last mark in it.
        """
        found = self._unfinished.search(data, max(at, len(data) - _LONGEST))
        if found is None:
            return len(data)
        start = found.start()
        tail = data[start:]
        return start if tail.startswith(self._begin) or self._begin.startswith(tail) else len(data)


def since_last_cell(data: bytes) -> tuple[bytes, bool]:
    """What is the user's in these bytes: the text behind the last end of a cell, without marks; and whether there was
    such an end.

    Example:
        >>> since_last_cell(b"before" + CellEnd(7).encode("ab12") + b"behind")
        (b'behind', True)
    """
    if b"\x1e" not in data:
        return data, False
    if _CELL_END.fullmatch(data):  # mostly
        return b"", True
    data = _PLACE.sub(b"", data)
    ends = list(_CELL_END.finditer(data))
    return (data[ends[-1].end() :], True) if ends else (data, False)
