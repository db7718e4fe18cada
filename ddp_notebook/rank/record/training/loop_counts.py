"""Counts of the training loops of a cell, which explain why a rank left its loop earlier than others."""

from __future__ import annotations

from typing import Any


class LoopCounts:
    """Numbers of backward passes and of batches in the running or last cell. Reset by each cell."""

    def __init__(self) -> None:
        self.backwards = 0
        self.drawn: dict[str, int] = {}  # number of batches, by loader
        self.ended: set[str] = set()  # loaders whose last iterator has ended

    def clear(self) -> None:
        """Reset the counts for a new cell."""
        self.backwards = 0
        self.drawn.clear()
        self.ended.clear()

    def draw(self, loader: str) -> None:
        """Count a batch of a loader."""
        self.drawn[loader] = self.drawn.get(loader, 0) + 1

    def to_json(self) -> dict[str, Any]:
        """Return the counts. Callable from any thread."""
        return {"backwards": self.backwards, "drawn": dict(self.drawn), "ended": sorted(self.ended)}
