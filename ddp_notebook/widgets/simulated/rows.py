"""Rows of all simulated ranks at once, and the texts that they name."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddp_notebook.records.schema import TABLES, TEXTS, Rows


class RowMaker:
    """Makes rows, a line of them for each rank: (world_size, n). All ranks number their texts alike."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._texts: dict[str, int] = {"": 0}
        self._told = 0

    def rows(self, table: str, count: int, **columns: Any) -> Rows:
        """So many rows of each rank, with these values in all of them; the others are zero. Texts are given as such."""
        rows = np.zeros((self.world_size, count), TABLES[table])
        rows["rank"] = np.arange(self.world_size)[:, None]
        for name, value in columns.items():
            rows[name] = self.text(value) if name in TEXTS[table] else value
        return rows

    def text(self, text: str) -> int:
        """The number of a text."""
        return self._texts.setdefault(text, len(self._texts))

    def new_texts(self) -> dict[int, str]:
        """Those that have come since the last time, by number."""
        told, self._told = self._told, len(self._texts) - 1
        return {number: text for text, number in self._texts.items() if number > told}
