"""Texts of a recording, sent once each: rows hold their numbers."""

from __future__ import annotations

import bisect
import dis
from collections.abc import Callable, Sequence
from types import CodeType

import torch

from ddp_notebook.rank.group.call_site import SiteFields
from ddp_notebook.rank.group.calls import Group
from ddp_notebook.stdlib import functools, json, os

_MOST_TEXTS = 200_000  # that a process numbers
_MOST_KNOWN = 10_000  # lines, and lists of shapes, whose text is remembered


class TextNumbers:
    """The numbers of texts, and the texts of groups, shapes and lines.

    Args:
        describe: words for calls as (file, line, function) and the number of their cell, see `where`.
    """

    def __init__(self, describe: Callable[[list[tuple[str, int, str]], int], str]) -> None:
        self._describe = describe
        self._numbers: dict[str, int] = {"": 0}
        self._new: dict[int, str] = {}
        self._groups: dict[tuple[str, tuple[int, ...]], int] = {}
        self._shapes: dict[tuple[torch.Size, ...], int] = {}
        self._sites: dict[tuple[int, ...], tuple[int, SiteFields]] = {}

    def take_new(self) -> dict[int, str]:
        """The texts that were numbered since the last call."""
        new, self._new = self._new, {}
        return new

    def tell_again(self) -> None:
        """Somebody reads from now on who knows no text."""
        self._new = {number: text for text, number in self._numbers.items() if number}

    def number(self, text: str) -> int:
        """The number of a text."""
        number = self._numbers.get(text)
        if number is None and len(self._numbers) >= _MOST_TEXTS:
            text = "(too many different texts)"
            number = self._numbers.get(text)
        if number is None:
            number = self._numbers[text] = len(self._numbers)
            self._new[number] = text
        return number

    def numbers(self, texts: Sequence[str]) -> list[int]:
        """The numbers of some texts."""
        known = self._numbers
        return [known[text] if text in known else self.number(text) for text in texts]

    def of_group(self, group: Group) -> int:
        """The number of a group's text."""
        key = (group.name, group.ranks)
        number = self._groups.get(key)
        if number is None:
            words = {"name": group.name, "title": group.title, "ranks": group.ranks}
            number = self._groups[key] = self.number(json.dumps(words))
        return number

    def of_shapes(self, shapes: Sequence[torch.Size]) -> int:
        """The number of the text of these shapes."""
        key = tuple(shapes)
        number = self._shapes.get(key)
        if number is None:
            if len(self._shapes) > _MOST_KNOWN:
                self._shapes.clear()
            number = self._shapes[key] = self.number(json.dumps([list(shape) for shape in shapes]))
        return number

    def of_dtype(self, dtype: torch.dtype | None) -> int:
        """The number of a type's name."""
        return self.number(dtype_name(dtype))

    def of_sites(self, sites: Sequence[SiteFields | None], titles: Sequence[int]) -> list[int]:
        """The numbers of the texts for the user's lines; 0: that is not known.

        Args:
            sites: the calls.
            titles: the numbers of their cells in `In [n]`.
        """
        return [0 if site is None else self.of_site(site, title) for site, title in zip(sites, titles, strict=True)]

    def of_site(self, site: SiteFields, title: int) -> int:
        """The same of one."""
        _, _, code, instruction, cell, _ = site
        if code is None:
            return 0
        # By ids: hashing a code object takes 2 us.
        key = (id(code), instruction, title) if cell is None else (id(code), instruction, title, id(cell[0]), cell[1])
        found = self._sites.get(key)
        if found is None:
            if len(self._sites) > _MOST_KNOWN:
                self._sites.clear()
            calls = [
                (of.co_filename, _line(of, instruction), of.co_name)
                for of, instruction in filter(None, ((code, instruction), cell))
            ]
            words = self._describe(calls, title)
            if not words:  # the line is in a script
                words = f"{os.path.basename(calls[0][0])}:{calls[0][1]} in {calls[0][2]}"
            found = self._sites[key] = (self.number(words), site)  # the site keeps the objects of these ids alive
        return found[0]


@functools.lru_cache(1000)
def dtype_name(dtype: torch.dtype | None) -> str:
    """`"float32"`; empty without a type."""
    return "" if dtype is None else str(dtype).removeprefix("torch.")


@functools.lru_cache(1000)
def _lines(code: CodeType) -> tuple[list[int], list[int]]:
    found = [(at, line) for at, line in dis.findlinestarts(code) if line is not None]
    return [at for at, _ in found], [line for _, line in found]


def _line(code: CodeType, instruction: int) -> int:
    starts, lines = _lines(code)
    return lines[max(0, bisect.bisect_right(starts, instruction) - 1)] if lines else code.co_firstlineno
