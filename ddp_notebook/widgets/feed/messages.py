"""What a view gets: a message, and the texts that stand behind the numbers in its tables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ddp_notebook.observe.tables.recorded import RecordedTables
from ddp_notebook.records.schema import Rows
from ddp_notebook.widgets.feed.tables import TEXTS

OWN_TEXTS = 1 << 24  # texts that are not the recording's are numbered from here
_MOST_OWN_TEXTS = 1 << 12  # the oldest is forgotten; one that comes again later gets another number


@dataclass(frozen=True, slots=True)
class FeedMessage:
    """What a view gets: JSON, and bytes."""

    header: dict[str, Any]
    data: bytes

    @property
    def nbytes(self) -> int:
        return len(json.dumps(self.header)) + len(self.data)


class FeedTexts:
    """Texts by number: those of a recording, those that only views need, and which of them every view knows.

    Args:
        recording: whose tables travel.

    Example:
        >>> texts = FeedTexts(RecordedTables(world_size=2))
        >>> texts.text(texts.own("idle"))
        'idle'
    """

    def __init__(self, recording: RecordedTables) -> None:
        self._recording = recording
        self._known: set[int] = set()  # numbers that every view has been told
        self._own_numbers: dict[str, int] = {}
        self._own_texts: dict[int, str] = {}
        self._next_own = OWN_TEXTS

    def own(self, text: str) -> int:
        """The number of a text that is not the recording's."""
        if not text:
            return 0
        number = self._own_numbers.get(text)
        if number is None:
            number, self._next_own = self._next_own, self._next_own + 1
            self._own_numbers[text], self._own_texts[number] = number, text
            if len(self._own_texts) > _MOST_OWN_TEXTS:
                oldest = next(iter(self._own_texts))
                del self._own_numbers[self._own_texts.pop(oldest)]
        return number

    def text(self, number: int) -> str:
        """The text of a number; of a group its title."""
        if number >= OWN_TEXTS:
            return self._own_texts.get(number, "")
        text = self._recording.text(number)
        return str(self._recording.group_of(number)["title"]) if text.startswith('{"name"') else text

    def of(self, tables: Mapping[str, Rows], layouts: Iterable[dict[str, Any]] = ()) -> list[list[Any]]:
        """Number and text of all that these rows and layouts name."""
        return [[number, self.text(number)] for number in _numbers(tables, layouts)]

    def untold(self, tables: Mapping[str, Rows], layouts: Iterable[dict[str, Any]]) -> list[list[Any]]:
        """Those of them that not every view knows yet. From now on they do."""
        new = [number for number in _numbers(tables, layouts) if number not in self._known]
        self._known.update(new)
        return [[number, self.text(number)] for number in new]

    def forget_told(self) -> None:
        """A new view knows the texts of its snapshot only."""
        self._known.clear()


def _numbers(tables: Mapping[str, Rows], layouts: Iterable[dict[str, Any]]) -> list[int]:
    """The numbers of all texts in these rows, ascending, without that of the empty text."""
    columns: list[npt.NDArray[Any]] = [
        np.unique(rows[name]) for table, rows in tables.items() for name in TEXTS[table] if len(rows)
    ]
    columns.append(np.array([one["model"] for one in layouts], np.uint32))
    found = np.unique(np.concatenate(columns)).tolist()
    return [number for number in found if number]
