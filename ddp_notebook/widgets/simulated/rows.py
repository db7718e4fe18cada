"""Rows of all simulated ranks, and their texts."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddp_notebook.records.schema import TABLES, TEXTS, Rows


class RowMaker:
    """Creates rows of shape (world_size, n). All ranks use the same numbers for texts."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._texts: dict[str, int] = {"": 0}
        self._told = 0

    def rows(self, table: str, count: int, **columns: Any) -> Rows:
        """Return `count` rows of each rank with these values. Other columns are zero. Pass texts as strings."""
        rows = np.zeros((self.world_size, count), TABLES[table])
        rows["rank"] = np.arange(self.world_size)[:, None]
        for name, value in columns.items():
            rows[name] = self.text(value) if name in TEXTS[table] else value
        return rows

    def text(self, text: str) -> int:
        """Return the number of a text."""
        return self._texts.setdefault(text, len(self._texts))

    def new_texts(self) -> dict[int, str]:
        """Return the texts that are new since the last call, by number."""
        told, self._told = self._told, len(self._texts) - 1
        return {number: text for text, number in self._texts.items() if number > told}
