"""All that a rank wrote, on disk: text that a cell's output leaves out can be read there."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import BinaryIO

_log = logging.getLogger(__name__)
LIMIT_BYTES = 64 << 20  # kept per rank


class RankLog:
    """The last `limit_bytes` of a rank's text, as it came; stdout and stderr in the order of arrival.

    Two files take turns, so that at least the limit is kept.

    Args:
        directory: where they are.
        number: of this log: a rank's number may be another one's later.
        limit_bytes: how much is kept.
    """

    def __init__(self, directory: Path, number: int, limit_bytes: int = LIMIT_BYTES) -> None:
        self._path = directory / f"rank{number}.log"
        self._older = directory / f"rank{number}.log.1"
        self._limit_bytes = limit_bytes
        self._file: BinaryIO | None = self._open()
        self._bytes = 0
        self._lock = threading.Lock()

    def _open(self) -> BinaryIO:
        return open(self._path, "wb", buffering=0)

    def write(self, text: str) -> None:
        """Append text."""
        data = text.encode("utf-8", "replace")
        with self._lock:
            if self._file is None:
                return
            try:
                if self._bytes > self._limit_bytes:
                    self._file.close()
                    os.replace(self._path, self._older)
                    self._file = self._open()
                    self._bytes = 0
                self._bytes += self._file.write(data) or 0
            except OSError as error:  # the disk is full: cells go on without a log
                _log.warning("no more of this rank's text is kept on disk: %s", error)
                self._file.close()
                self._file = None

    def read(self) -> str:
        """All that is kept."""
        with self._lock:
            parts = [path.read_bytes() for path in (self._older, self._path) if path.exists()]
        data = b"".join(parts)
        if len(data) > self._limit_bytes:
            cut = data.find(b"\n", len(data) - self._limit_bytes)
            data = data[cut + 1 :]
        return data.decode("utf-8", "replace")

    def renumber(self, number: int) -> None:
        """Have this number from now on, which no other log has."""
        with self._lock:
            names = f"rank{number}.log", f"rank{number}.log.1"
            for path, name in zip((self._path, self._older), names, strict=True):
                if path.exists():
                    path.rename(path.with_name(name))
            self._path, self._older = (self._path.with_name(name) for name in names)

    def remove(self) -> None:
        """Write no more, and leave no file."""
        self.close()
        for path in (self._path, self._older):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Write no more. The files go with the session's directory."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None
