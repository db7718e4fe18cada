"""Create files and folders for this user only.

The mode is set after creation, because a umask may remove permissions of the owner too.
"""

from __future__ import annotations

import os
import tempfile

FOLDER, FILE = 0o700, 0o600


def make_folder(path: str | os.PathLike[str]) -> None:
    """Create a private folder.

    Raises:
        FileExistsError: the folder exists. Its mode is not changed.
        OSError: the folder cannot be created.
    """
    os.mkdir(path, FOLDER)
    os.chmod(path, FOLDER)


def new_folder(prefix: str, parent: str | os.PathLike[str]) -> str:
    """Create a private folder with a unique name.

    Raises:
        OSError: the folder cannot be created.
    """
    folder = tempfile.mkdtemp(prefix=prefix, dir=parent)
    os.chmod(folder, FOLDER)
    return folder


def new_file(prefix: str, suffix: str, parent: str | os.PathLike[str]) -> tuple[int, str]:
    """Create a private file with a unique name. Return its descriptor and path.

    Raises:
        OSError: the file cannot be created.
    """
    fd, path = tempfile.mkstemp(prefix=prefix, suffix=suffix, dir=parent)
    os.fchmod(fd, FILE)
    return fd, path


def opener(path: str, flags: int) -> int:
    """Open a file as a private one; for the `opener` argument of `open`.

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
