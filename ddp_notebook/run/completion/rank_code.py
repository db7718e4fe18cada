"""Find the code of ranks in a cell."""

from __future__ import annotations

import re
from dataclasses import dataclass

_CELL = re.compile(r"\s*%%(on_all_ranks|on_ranks|ddp_twice)\b([^\n]*)\n")
_RANKS = re.compile(r"--ranks[ =](\S+)")
_OPTIONS = r"((?:--(?:quiet|here|background|profile)[ \t]+|--[a-z]+[ =]\S+[ \t]+)*)"
_LINE = re.compile(rf"(?:^|(?<=\n))[ \t]*%on_all_ranks\b[ \t]*{_OPTIONS}")
# Lines with an expression of ranks, or with names of their variables, and options.
_EXPRESSION = re.compile(r"(?:^|(?<=\n))[ \t]*%(?:ddp_verify|ddp_memory|ddp_peek)[ \t]+")
_NAMES = re.compile(r"(?:^|(?<=\n))[ \t]*%(?:ddp_whos|ddp_pull)[ \t]+")
_IN_OPTION = re.compile(r"(?:^|\s)-[\w-]*$")
_IN_VALUE = re.compile(r"(?:^|\s)--(?:as|ranks)[ =]\S*$")


@dataclass(frozen=True, slots=True)
class RankCode:
    """Code of ranks in a cell.

    Args:
        start: its first character in the cell.
        ranks: set of ranks as written; None: all.
        is_names: only names of variables may follow.
    """

    start: int
    ranks: str | None = None
    is_names: bool = False


def cell_code_start(cell: str) -> int | None:
    """Return the position after the magic of a cell whose code runs on ranks; None for another cell.

    Example:
        >>> cell_code_start("%%on_ranks 1\\nx"), cell_code_start("x")
        (13, None)
    """
    found = _CELL.match(cell)
    return None if found is None else found.end()


def rank_code(cell: str, position: int, *, is_auto: bool = False) -> RankCode | None:
    """Return the code of ranks at a position of a cell. None: the notebook runs the code at this position.

    Args:
        is_auto: `%ddp_auto on` sends this cell to the ranks.

    Example:
        >>> rank_code("%%on_ranks 1 --quiet\\nmodel.", 27)
        RankCode(start=21, ranks='1', is_names=False)
        >>> rank_code("x = 1\\n%on_all_ranks mod", 23)
        RankCode(start=20, ranks=None, is_names=False)
        >>> rank_code("x = 1", 5)
    """
    if (found := _CELL.match(cell)) is not None:
        name, line = found.groups()
        words = line.split()
        named = _RANKS.search(line)
        ranks = words[0] if name == "on_ranks" and words else named[1] if named else None
        return RankCode(found.end(), ranks) if position >= found.end() else None
    for found in _LINE.finditer(cell):
        end = cell.find("\n", found.end())
        if found.end() <= position <= (len(cell) if end < 0 else end):
            named = _RANKS.search(found[1])
            return RankCode(found.end(), named[1] if named else None)
    for form in (_EXPRESSION, _NAMES):
        for found in form.finditer(cell):
            if found.end() <= position and "\n" not in (text := cell[found.end() : position]):
                is_names = form is _NAMES
                is_option = _IN_OPTION.search(text) or (is_names and _IN_VALUE.search(text))
                return None if is_option else RankCode(found.end(), is_names=is_names)
    return RankCode(0) if is_auto else None
