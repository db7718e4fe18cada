"""Files that arrive here: each is written under another name, and gets its own when it is whole."""

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
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)  # as exFAT, Google Drive and some of networks say


class Landing:
    """Writes files one after the other. Leaving it removes the one that is not whole.

    Args:
        overwrite: replace what is there.
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
        """Add bytes to the file that is to be `target`. After them comes more of it, or `end`.

        Raises:
            CannotWriteError: it cannot be written here.
        """
        try:
            if self._file is None:
                target.parent.mkdir(parents=True, exist_ok=True)
                self._name = target.parent / a_name()
                fd = modes.opener(str(self._name), os.O_CREAT | os.O_EXCL | os.O_WRONLY)  # others may not read it
                self._file = open(fd, "wb", buffering=0)  # noqa: SIM115 - closed by `end`, or on leaving
            data = memoryview(data)
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            raise cannot_write(target, error, _ADVICE) from error

    def end(self, target: Path, mode: int, mtime_ns: int) -> None:
        """The file is whole.

        Args:
            target: what it is to be.
            mode: its permissions.
            mtime_ns: its time.

        Raises:
            CannotWriteError: it cannot be written here, or somebody else has made it meanwhile.
        """
        self.write(target, b"")
        assert self._file is not None and self._name is not None
        try:
            self._file.close()
            self._file = None
            os.chmod(self._name, mode & 0o777)  # it gives nobody its owner's rights here
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
    """Give a file a name that nothing has.

    Raises:
        OSError: something has it.
    """
    try:
        os.link(path, target)  # which fails where there is one
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from error
        os.rename(path, target)
    else:
        path.unlink()
