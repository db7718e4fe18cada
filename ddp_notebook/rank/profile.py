"""torch's profiler around one cell, written where the notebook finds it."""

from __future__ import annotations

from typing import Any

import torch


class Profile:
    """Of the cell under way.

    Args:
        path: of the Chrome trace that `end` writes.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler: Any = torch.profiler.profile(activities=activities)
        self._profiler.start()

    def end(self) -> None:
        """The cell has ended."""
        self._profiler.stop()
        self._profiler.export_chrome_trace(self._path)
