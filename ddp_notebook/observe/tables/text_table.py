"""Texts of a recording by number, and the mapping of the numbers that each process of a rank uses."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ddp_notebook.records.schema import TEXT

Numbers = npt.NDArray[np.uint32]
_MOST_BYTES = 64 << 20  # limit of all texts: a program may use a new metric name in each step
_MOST_NUMBER = 1 << 22  # highest number of a text of a rank: its mapping is a table with this number of entries
_TOO_MANY = "(too many different texts)"


class TextTable:
    """Unique texts. Numbers start at 1; 0 is the empty text.

    Example:
        >>> texts = TextTable()
        >>> texts.number("all_reduce"), texts.number("send"), texts.number("all_reduce")
        (1, 2, 1)
        >>> texts[2]
        'send'
    """

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._texts = [""]
        self._numbers = {"": 0}
        self._nbytes = 0
        self._parse = functools.lru_cache(maxsize=4096)(self._parsed)
        for text in texts:
            self.number(text)

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, number: int) -> str:
        return self._texts[number]

    def number(self, text: str) -> int:
        """Return the number of a text, and add the text if it is new."""
        number = self._numbers.get(text)
        if number is not None:
            return number
        if not text.isascii() and (legible := text.encode("utf-8", "backslashreplace").decode()) != text:
            number = self._numbers[text] = self.number(legible)  # files and pages cannot contain a lone surrogate
            return number
        if self._nbytes > _MOST_BYTES and text != _TOO_MANY:
            return self.number(_TOO_MANY)
        self._nbytes += len(text)
        self._texts.append(text)  # before its number is stored, because readers are other threads
        self._numbers[text] = len(self._texts) - 1
        return len(self._texts) - 1

    def find(self, text: str) -> int | None:
        """Return the number of a text, or None if it is unknown."""
        return self._numbers.get(text)

    def of(self, numbers: npt.NDArray[Any]) -> list[str]:
        """Return the texts of a column."""
        texts = self._texts
        return [texts[number] for number in numbers.tolist()]

    def parsed(self, number: int) -> Any:
        """Return the value of a JSON text, or None if it is not JSON. The value is cached: do not change it."""
        return self._parse(number)

    def _parsed(self, number: int) -> Any:
        try:
            return json.loads(self._texts[number])
        except ValueError:  # empty, or too many texts
            return None

    def all(self) -> list[str]:
        """Return all texts in the order of their numbers, without the empty one."""
        return self._texts[1:]


class Translation:
    """Mapping of one process's text numbers to those of the table. Unknown numbers map to the empty text."""

    def __init__(self, texts: TextTable) -> None:
        self._texts = texts
        self._ours: Numbers = np.zeros(64, TEXT)

    def learn(self, texts: Mapping[int, str]) -> None:
        """Add texts with the numbers that the process uses."""
        for number, text in texts.items():
            if 0 < number < _MOST_NUMBER:
                if number >= len(self._ours):
                    self._ours = np.concatenate((self._ours, np.zeros(max(number, len(self._ours)), TEXT)))
                self._ours[number] = self._texts.number(text)

    def __call__(self, numbers: Numbers) -> Numbers:
        """Convert a column of the process's numbers."""
        try:
            return self._ours.take(numbers)
        except IndexError:  # some numbers are unknown
            return np.where(numbers < len(self._ours), self._ours.take(numbers, mode="clip"), 0).astype(TEXT)
