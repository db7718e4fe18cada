"""The complete output of a rank on disk, including text that the notebook does not show."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from pathlib import Path
from typing import BinaryIO

from ddp_notebook.errors import StartError
from ddp_notebook.registry import modes, private

_log = logging.getLogger(__name__)
LIMIT_BYTES = 64 << 20  # kept per rank


class RankLog:
    """The last `limit_bytes` of a rank's text, unchanged; stdout and stderr in the order of arrival.

    Two files alternate, so that at least the limit is kept.

    Args:
        directory: of the files.
        number: of this log, used in the file names.
        limit_bytes: how much is kept.
    """

    def __init__(self, directory: Path, number: int, limit_bytes: int = LIMIT_BYTES) -> None:
        self._path = directory / f"rank{number}.log"
        self._older = directory / f"rank{number}.log.1"
        self._limit_bytes = limit_bytes
        self._file: BinaryIO | None = None
        self._older_file: BinaryIO | None = None
        self._bytes = 0
        self._is_closed = False
        self._trouble = ""  # reason why text was left out last
        self._lock = threading.Lock()
        with contextlib.suppress(OSError, StartError):  # the next write tries again
            self._file = self._open()

    def _open(self) -> BinaryIO:
        private.restore(str(self._path.parent))
        return open(self._path, "w+b", buffering=0, opener=modes.opener)

    def write(self, text: str) -> None:
        """Append text."""
        data = text.encode("utf-8", "replace")
        with self._lock:
            if self._is_closed:
                return
            try:
                self._write(data)
                self._trouble = ""
            except (OSError, StartError) as error:  # cells continue without a log, and the next write may succeed
                why = error.strerror if isinstance(error, OSError) else str(error)
                if why != self._trouble:
                    _log.warning("a part of this rank's text is not kept in %s: %s", self._path, why)
                    self._trouble = why or ""

    def _write(self, data: bytes) -> None:
        self._restore()
        if self._file is None:
            self._file = self._open()
        if self._bytes > self._limit_bytes:
            os.replace(self._path, self._older)
            if self._older_file is not None:
                self._older_file.close()
            self._older_file, self._file, self._bytes = self._file, None, 0
            self._file = self._open()
        while data:
            written = self._file.write(data) or 0  # a disk that becomes full accepts a part
            self._bytes += written
            data = data[written:]

    def restore(self) -> None:
        """Write the files again if a cleanup has removed them: shell programs read them by name."""
        with self._lock, contextlib.suppress(OSError, StartError):
            if not self._is_closed:
                self._restore()

    def _restore(self) -> None:
        for file, path in ((self._older_file, self._older), (self._file, self._path)):
            if file is None or os.fstat(file.fileno()).st_nlink:
                continue
            private.restore(str(path.parent))
            again = private.copy_of(file, path)
            file.close()
            if path == self._path:
                self._file = again
            else:
                self._older_file = again

    def read(self) -> str:
        """Return all kept text, even if the files were removed."""
        with self._lock:
            files = [file for file in (self._older_file, self._file) if file is not None]
            data = b"".join(os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0) for file in files)
        if len(data) > self._limit_bytes:
            cut = data.find(b"\n", len(data) - self._limit_bytes)
            data = data[cut + 1 :]
        return data.decode("utf-8", "replace")

    def renumber(self, number: int) -> None:
        """Change the number in the file names. No other log may have this number."""
        with self._lock:
            names = f"rank{number}.log", f"rank{number}.log.1"
            for path, name in zip((self._path, self._older), names, strict=True):
                if path.exists():
                    path.rename(path.with_name(name))
            self._path, self._older = (self._path.with_name(name) for name in names)

    def remove(self) -> None:
        """Stop writing, and remove the files."""
        self.close()
        for path in (self._path, self._older):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Stop writing. The files are removed with the session's directory."""
        with self._lock:
            self._is_closed = True
            for file in (self._older_file, self._file):
                if file is not None:
                    file.close()
            self._older_file = self._file = None
