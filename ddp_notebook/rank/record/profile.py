"""torch's profiler around one cell, written where the notebook finds it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ddp_notebook.registry import private
from ddp_notebook.stdlib import contextlib, os


class TorchProfile:
    """A profile of the cell under way.

    Args:
        path: the file of the Chrome trace that `end` writes.
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
        """The cell has ended. If the profile cannot be written, a message says so and the file is empty."""
        with _silent():
            self._profiler.stop()
        folder = os.path.dirname(self._path)
        private.restore(folder)
        with _silent():
            self._profiler.export_chrome_trace(self._path)  # it raises nothing when it fails
        with contextlib.suppress(OSError):  # a full disk may have kept torch from making it
            os.chmod(self._path, 0o600)
        if not _is_whole(self._path):
            free_mb = shutil.disk_usage(folder).free / 1e6
            print(
                f"ddp_notebook: the profile is lost: it could not be written to {folder} ({free_mb:,.0f} MB are free)",
                file=sys.stderr,
            )
            open(self._path, "wb").close()


def _is_whole(path: str) -> bool:
    """Whether torch has written a trace to its end: the last entry is the trace's name."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - len(path) - 100))
            return b'"traceName"' in file.read()
    except OSError:  # it is not there
        return False


@contextmanager
def _silent() -> Iterator[None]:
    """Hide fd 2: torch 2.13 writes two lines with times and process ids there, whatever its log level."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
