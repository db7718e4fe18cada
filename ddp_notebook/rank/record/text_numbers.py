"""Numbers for the texts of a recording. Each text is sent once; rows contain its number."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ddp_notebook.rank.group.call_site import SiteFields, calls_of
from ddp_notebook.rank.group.calls import Group
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import functools, json, os

_MOST_TEXTS = 200_000  # maximum number of texts of a process
_MOST_KNOWN = 10_000  # lines, and lists of shapes, whose text is cached


class TextNumbers:
    """Numbers of texts, and the texts of groups, shapes and lines.

    Args:
        describe: describes calls, given as (file, line, function) and the number of their cell, see `where`.
    """

    def __init__(self, describe: Callable[[list[tuple[str, int, str]], int], str]) -> None:
        self._describe = describe
        self._numbers: dict[str, int] = {"": 0}
        self._new: dict[int, str] = {}
        self._groups: dict[tuple[str, tuple[int, ...]], int] = {}
        self._shapes: dict[tuple[torch.Size, ...], int] = {}
        self._sites: dict[tuple[int, ...], tuple[int, SiteFields]] = {}

    def take_new(self) -> dict[int, str]:
        """Return the texts that were numbered since the last call."""
        new, self._new = self._new, {}
        return new

    def tell_again(self) -> None:
        """Send all texts again, for a receiver that has none."""
        self._new = {number: text for text, number in self._numbers.items() if number}

    def number(self, text: str) -> int:
        """Return the number of a text."""
        number = self._numbers.get(text)
        if number is None and len(self._numbers) >= _MOST_TEXTS:
            text = "(too many different texts)"
            number = self._numbers.get(text)
        if number is None:
            number = self._numbers[text] = len(self._numbers)
            self._new[number] = text
        return number

    def numbers(self, texts: Sequence[str]) -> list[int]:
        """Return the numbers of some texts."""
        known = self._numbers
        return [known[text] if text in known else self.number(text) for text in texts]

    def of_group(self, group: Group) -> int:
        """Return the number of a group's text."""
        key = (group.name, group.ranks)
        number = self._groups.get(key)
        if number is None:
            words = {"name": group.name, "title": group.title, "ranks": group.ranks}
            number = self._groups[key] = self.number(json.dumps(words))
        return number

    def of_shapes(self, shapes: Sequence[torch.Size]) -> int:
        """Return the number of the text of these shapes."""
        key = tuple(shapes)
        number = self._shapes.get(key)
        if number is None:
            if len(self._shapes) > _MOST_KNOWN:
                self._shapes.clear()
            number = self._shapes[key] = self.number(json.dumps([list(shape) for shape in shapes]))
        return number

    def of_dtype(self, dtype: torch.dtype | None) -> int:
        """Return the number of a dtype's name."""
        return self.number(dtype_name(dtype))

    def of_sites(self, sites: Sequence[SiteFields | None], titles: Sequence[int]) -> list[int]:
        """Return the numbers of the texts of the user's lines; 0 for unknown lines.

        Args:
            sites: the calls.
            titles: numbers of their cells in `In [n]`.
        """
        return [0 if site is None else self.of_site(site, title) for site, title in zip(sites, titles, strict=True)]

    def of_site(self, site: SiteFields, title: int) -> int:
        """Return the number of the text of one line."""
        _, _, code, instruction, cell, _, _ = site
        if code is None:
            return 0
        # Uses ids, since hashing a code object takes 2 us.
        key = (id(code), instruction, title) if cell is None else (id(code), instruction, title, id(cell[0]), cell[1])
        found = self._sites.get(key)
        if found is None:
            if len(self._sites) > _MOST_KNOWN:
                self._sites.clear()
            calls = calls_of(site)
            words = self._describe(calls, title)
            if not words:  # the line is in a script
                words = f"{os.path.basename(calls[0][0])}:{calls[0][1]} in {calls[0][2]}"
            found = self._sites[key] = (self.number(words), site)  # the site keeps the objects of these ids alive
        return found[0]


@functools.lru_cache(1000)
def dtype_name(dtype: torch.dtype | None) -> str:
    """Return the name of a dtype, such as "float32"; "" for None."""
    return "" if dtype is None else str(dtype).removeprefix("torch.")
