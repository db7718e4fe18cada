"""The texts of a recording by number, and what the numbers of each rank's process mean here."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ddp_notebook.records.schema import TEXT

Numbers = npt.NDArray[np.uint32]
_MOST_BYTES = 64 << 20  # of all texts: a metric may be given a new name in each step
_MOST_NUMBER = 1 << 22  # highest number that a rank may give to a text: its table here has so many entries
_TOO_MANY = "(too many different texts)"


class TextTable:
    """Texts, each once. Numbers count from 1; 0 is the empty text.

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
        """The number of a text, which is learnt if it is new."""
        number = self._numbers.get(text)
        if number is not None:
            return number
        if not text.isascii() and (legible := text.encode("utf-8", "backslashreplace").decode()) != text:
            number = self._numbers[text] = self.number(legible)  # no file and no page takes a half of a character
            return number
        if self._nbytes > _MOST_BYTES and text != _TOO_MANY:
            return self.number(_TOO_MANY)
        self._nbytes += len(text)
        self._texts.append(text)  # before its number is known: readers are other threads
        self._numbers[text] = len(self._texts) - 1
        return len(self._texts) - 1

    def find(self, text: str) -> int | None:
        """The number of a text; None where no row has had it."""
        return self._numbers.get(text)

    def of(self, numbers: npt.NDArray[Any]) -> list[str]:
        """The texts of a column."""
        texts = self._texts
        return [texts[number] for number in numbers.tolist()]

    def parsed(self, number: int) -> Any:
        """The value of a text that is JSON; None where it is none. It is cached: do not change it."""
        return self._parse(number)

    def _parsed(self, number: int) -> Any:
        try:
            return json.loads(self._texts[number])
        except ValueError:  # empty, or too many texts
            return None

    def all(self) -> list[str]:
        """Every text in the order of its number, without the empty one."""
        return self._texts[1:]


class Translation:
    """What the numbers of one process mean here. Numbers that it has not told mean the empty text."""

    def __init__(self, texts: TextTable) -> None:
        self._texts = texts
        self._ours: Numbers = np.zeros(64, TEXT)

    def learn(self, texts: Mapping[int, str]) -> None:
        """Take in texts under the numbers that the process gives them."""
        for number, text in texts.items():
            if 0 < number < _MOST_NUMBER:
                if number >= len(self._ours):
                    self._ours = np.concatenate((self._ours, np.zeros(max(number, len(self._ours)), TEXT)))
                self._ours[number] = self._texts.number(text)

    def __call__(self, numbers: Numbers) -> Numbers:
        """Our numbers for a column of theirs."""
        try:
            return self._ours.take(numbers)
        except IndexError:  # some were never told
            return np.where(numbers < len(self._ours), self._ours.take(numbers, mode="clip"), 0).astype(TEXT)
