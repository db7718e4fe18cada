"""torch's profiler around one cell, written where the notebook finds it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
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
        with _silent():
            self._profiler.start()

    def end(self) -> None:
        """The cell has ended."""
        with _silent():
            self._profiler.stop()
        self._profiler.export_chrome_trace(self._path)


@contextmanager
def _silent() -> Iterator[None]:
    """torch 2.13 writes two lines with times and process ids, whatever its log level is."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
