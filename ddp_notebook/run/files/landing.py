"""Write received files: each has a temporary name, and gets its own name when it is complete."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from ddp_notebook.observe.writing import cannot_write
from ddp_notebook.records.marker import a_name
from ddp_notebook.registry import modes

_ADVICE = "name another folder with --to (to=)"
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)  # errors of exFAT, Google Drive and some network file systems


class Landing:
    """Writes files one after the other. On exit it removes an incomplete file.

    Args:
        overwrite: replace existing files.
    """

    def __init__(self, *, overwrite: bool) -> None:
        self.written: list[Path] = []
        self._overwrite = overwrite
        self._name: Path | None = None
        self._file: BinaryIO | None = None

    def __enter__(self) -> Landing:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        if self._name is not None:
            with contextlib.suppress(OSError):
                self._name.unlink()

    def write(self, target: Path, data: bytes | memoryview) -> None:
        """Append bytes to the file that will become `target`. More bytes of the file or `end` must follow.

        Raises:
            CannotWriteError: the file cannot be written.
        """
        try:
            if self._file is None:
                target.parent.mkdir(parents=True, exist_ok=True)
                self._name = target.parent / a_name()
                fd = modes.opener(str(self._name), os.O_CREAT | os.O_EXCL | os.O_WRONLY)  # other users may not read it
                self._file = open(fd, "wb", buffering=0)  # noqa: SIM115 - closed by `end`, or on leaving
            data = memoryview(data)
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            raise cannot_write(target, error, _ADVICE) from error

    def end(self, target: Path, mode: int, mtime_ns: int) -> None:
        """Complete the file.

        Args:
            target: final path.
            mode: permissions.
            mtime_ns: modification time.

        Raises:
            CannotWriteError: the file cannot be written, or another program has created it since.
        """
        self.write(target, b"")
        assert self._file is not None and self._name is not None
        try:
            self._file.close()
            self._file = None
            os.chmod(self._name, mode & 0o777)  # without setuid and setgid
            os.utime(self._name, ns=(mtime_ns, mtime_ns))
            if self._overwrite:
                os.replace(self._name, target)
            else:
                _name_new(self._name, target)
        except OSError as error:
            raise cannot_write(target, error, _ADVICE) from error
        self._name = None
        self.written.append(target)


def _name_new(path: Path, target: Path) -> None:
    """Rename a file to a name that does not exist yet.

    Raises:
        OSError: the name exists.
    """
    try:
        os.link(path, target)  # fails if the name exists
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from error
        os.rename(path, target)
    else:
        path.unlink()
