"""Files and folders for this user only. Their modes are set after they were made: a umask takes bits away from the mode
that the system is given, also those of the owner."""

from __future__ import annotations

import os
import tempfile

FOLDER, FILE = 0o700, 0o600


def make_folder(path: str | os.PathLike[str]) -> None:
    """Make a folder.

    Raises:
        FileExistsError: it exists. Its mode stays.
        OSError: it cannot be made.
    """
    os.mkdir(path, FOLDER)
    os.chmod(path, FOLDER)


def new_folder(prefix: str, parent: str | os.PathLike[str]) -> str:
    """Make a folder with a name that no other has.

    Raises:
        OSError: it cannot be made.
    """
    folder = tempfile.mkdtemp(prefix=prefix, dir=parent)
    os.chmod(folder, FOLDER)
    return folder


def new_file(prefix: str, suffix: str, parent: str | os.PathLike[str]) -> tuple[int, str]:
    """Make a file with a name that no other has. Returns its descriptor and its path.

    Raises:
        OSError: it cannot be made.
    """
    fd, path = tempfile.mkstemp(prefix=prefix, suffix=suffix, dir=parent)
    os.fchmod(fd, FILE)
    return fd, path


def opener(path: str, flags: int) -> int:
    """Open a file of this user. An argument of `open`.

    Example:
        >>> path = os.path.join(tempfile.mkdtemp(), "log")
        >>> before = os.umask(0o777)
        >>> open(path, "w", opener=opener).close()
        >>> _ = os.umask(before)
        >>> oct(os.stat(path).st_mode)
        '0o100600'
    """
    fd = os.open(path, flags | os.O_CLOEXEC, FILE)
    try:
        os.fchmod(fd, FILE)
    except BaseException:
        os.close(fd)
        raise
    return fd
