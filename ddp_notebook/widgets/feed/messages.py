"""Messages to a view, and the numbered texts of their tables."""

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

OWN_TEXTS = 1 << 24  # first number of texts that are not in the recording
_MOST_OWN_TEXTS = 1 << 12  # above this, the oldest text is dropped; it gets a new number if it is needed again


@dataclass(frozen=True, slots=True)
class FeedMessage:
    """Message to a view: a JSON header and binary data."""

    header: dict[str, Any]
    data: bytes

    @property
    def nbytes(self) -> int:
        return len(json.dumps(self.header)) + len(self.data)


class FeedTexts:
    """Texts by number: those of a recording, and additional texts for views. Tracks the texts that all views know.

    Args:
        recording: Recording whose tables are sent.

    Example:
        >>> texts = FeedTexts(RecordedTables(world_size=2))
        >>> texts.text(texts.own("idle"))
        'idle'
    """

    def __init__(self, recording: RecordedTables) -> None:
        self._recording = recording
        self._known: set[int] = set()  # numbers of the texts that all views have received
        self._own_numbers: dict[str, int] = {}
        self._own_texts: dict[int, str] = {}
        self._next_own = OWN_TEXTS

    def own(self, text: str) -> int:
        """Return the number of a text that is not in the recording."""
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
        """Return the text of a number. For a group, return its title."""
        if number >= OWN_TEXTS:
            return self._own_texts.get(number, "")
        text = self._recording.text(number)
        return str(self._recording.group_of(number)["title"]) if text.startswith('{"name"') else text

    def of(self, tables: Mapping[str, Rows], layouts: Iterable[dict[str, Any]] = ()) -> list[list[Any]]:
        """Return the numbers and texts that these rows and layouts refer to."""
        return [[number, self.text(number)] for number in _numbers(tables, layouts)]

    def untold(self, tables: Mapping[str, Rows], layouts: Iterable[dict[str, Any]]) -> list[list[Any]]:
        """Return the texts of these rows and layouts that not all views know, and mark them as known."""
        new = [number for number in _numbers(tables, layouts) if number not in self._known]
        self._known.update(new)
        return [[number, self.text(number)] for number in new]

    def forget_told(self) -> None:
        """Mark all texts as unknown, because a new view knows only the texts of its snapshot."""
        self._known.clear()


def _numbers(tables: Mapping[str, Rows], layouts: Iterable[dict[str, Any]]) -> list[int]:
    """Return the numbers of all texts in these rows, ascending, without the empty text."""
    columns: list[npt.NDArray[Any]] = [
        np.unique(rows[name]) for table, rows in tables.items() for name in TEXTS[table] if len(rows)
    ]
    columns.append(np.array([one["model"] for one in layouts], np.uint32))
    found = np.unique(np.concatenate(columns)).tolist()
    return [number for number in found if number]
