"""Files of cells: that of the front end, with the magic, and that of the code which ranks run.

A front end writes a cell to a file before it sets breakpoints in it, by the request `dumpCell`. The file name is a hash
of the cell's text. Ranks compile the code below `%%on_all_ranks`, with the name that a kernel gives to this text.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import CodeType
from typing import NamedTuple

from ddp_notebook.run.completion.rank_code import cell_code_start


class CellSource(NamedTuple):
    """A cell.

    Args:
        file: file name of its code on ranks.
        above: number of lines above this code.
        is_of_ranks: it runs on ranks. False: it may do so, under `%ddp_auto`.
        lines: lines with code, from 1; empty if Python cannot compile the code, because of magics.
    """

    file: str
    above: int
    is_of_ranks: bool
    lines: list[int]

    def line_on_ranks(self, line: int) -> int:
        """Return the line of a breakpoint on ranks, or 0 for a line of the magic above unknown code.

        A line without code is replaced by the line with code above it, as pydevd does. A line of the magic is replaced
        by the first line with code. VS Code's "Run by Line" sets its breakpoint there.
        """
        line -= self.above
        if self.lines and line not in self.lines:
            return self.lines[max(bisect.bisect(self.lines, line) - 1, 0)]
        return max(line, 0)


class CellSources:
    """Finds the cells of files, and the files of cells.

    Args:
        folder: folder in which the kernel writes cells.
        file_of: returns the file name that the kernel gives to a cell.
        executed: returns the cells that the user has run.
    """

    def __init__(self, folder: str, file_of: Callable[[str], str], executed: Callable[[], Sequence[str]]) -> None:
        self._folder = Path(folder)
        self._file_of = file_of
        self._executed = executed
        self._known = 0  # number of executed cells that were added
        self._cells: dict[str, CellSource] = {}  # cells by their file of the front end
        self._outer: dict[str, str] = {}  # file of the front end, by file on ranks

    def has(self, path: str) -> bool:
        """Return whether a file is one of cells."""
        return Path(path).parent == self._folder

    def cell(self, path: str) -> CellSource | None:
        """Return the cell that the front end has written to a file; None for another file."""
        if path not in self._cells and self.has(path):
            with suppress(OSError):
                self._add(path, Path(path).read_text(encoding="utf-8"))
        return self._cells.get(path)

    def outer(self, file: str, line: int) -> tuple[str, int]:
        """Return the file and line of the front end for those on ranks; the same ones for other files."""
        if not self.has(file):
            return file, line
        if file not in self._outer:
            executed = self._executed()
            for code in executed[self._known :]:
                self._add(self._file_of(code), code)
            self._known = len(executed)
        path = self._outer.get(file, file)
        return path, line + (self._cells[path].above if path in self._cells else 0)

    def _add(self, path: str, code: str) -> None:
        start = cell_code_start(code)
        inner = code[start or 0 :]
        inner += "" if inner.endswith("\n") else "\n"  # IPython adds it
        file = self._file_of(inner)
        above = code[: start or 0].count("\n")
        self._cells[path] = CellSource(file, above, start is not None, list(_lines_with_code(inner)))
        self._outer[file] = path


def _lines_with_code(source: str) -> Iterator[int]:
    try:
        codes = [compile(source, "cell", "exec", dont_inherit=True)]
    except (SyntaxError, ValueError):
        return
    lines: set[int] = set()
    while codes:
        code = codes.pop()
        lines |= {line for _, _, line in code.co_lines() if line}
        codes += [one for one in code.co_consts if isinstance(one, CodeType)]
    yield from sorted(lines)
