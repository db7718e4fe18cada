"""Counts of the training loops of a cell, which explain why a rank left its loop earlier than others."""

from __future__ import annotations

from typing import Any


class LoopCounts:
    """Numbers of backward passes and of batches in the running or last cell. Reset by each cell."""

    def __init__(self) -> None:
        self.backwards = 0
        self.drawn: dict[str, int] = {}  # number of batches, by loader
        self.passes: dict[str, list[int]] = {}  # number of the last pass over each loader, and its batches
        self.ended: set[str] = set()  # loaders whose last pass has ended

    def clear(self) -> None:
        """Reset the counts for a new cell."""
        self.backwards = 0
        self.drawn.clear()
        self.passes.clear()
        self.ended.clear()

    def begin(self, loader: str) -> None:
        """Count a pass over a loader."""
        number = self.passes[loader][0] if loader in self.passes else 0
        self.passes[loader] = [number + 1, 0]
        self.ended.discard(loader)

    def draw(self, loader: str) -> None:
        """Count a batch of a loader."""
        self.drawn[loader] = self.drawn.get(loader, 0) + 1
        self.passes.setdefault(loader, [0, 0])[1] += 1  # 0: an earlier cell has begun the pass

    def to_json(self) -> dict[str, Any]:
        """Return the counts. Callable from any thread."""
        passes = {loader: list(last) for loader, last in list(self.passes.items())}
        return {
            "backwards": self.backwards,
            "drawn": dict(self.drawn),
            "passes": passes,
            "ended": sorted(self.ended),
        }
