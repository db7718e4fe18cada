"""Private folders of this user: their paths, and how to recreate them after a cleaner removed them."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ddp_notebook.errors import StartError, UsageError
from ddp_notebook.registry import entries, modes

_LONGEST = 70  # maximum length of the runtime directory's path; a Unix socket path below it is limited to 108 bytes


def restore(folder: str) -> None:
    """Recreate a removed folder and its parents with mode 0700. An existing folder is only checked.

    Raises:
        StartError: the path is a link, belongs to another user, or is writable by other users.
        OSError: the folder cannot be created.

    Example:
        >>> folder = os.path.join(tempfile.mkdtemp(), "a", "b")
        >>> restore(folder)
        >>> oct(os.stat(folder).st_mode)
        '0o40700'
        >>> os.removedirs(folder)
    """
    try:
        try:
            modes.make_folder(folder)
        except FileNotFoundError:
            if not (parent := os.path.dirname(folder)):  # the working directory was removed
                raise
            restore(parent)
            modes.make_folder(folder)
    except FileExistsError:  # existed before, or another process just created it
        check(folder)


def check(folder: str) -> None:
    """Check that other users cannot write to a folder. Set mode 0700 if they can read it.

    Libraries also recreate folders, with their own mode.

    Raises:
        StartError: the path is a link, belongs to another user, or is writable by other users.
    """
    its = os.lstat(folder)
    is_ours = stat.S_ISDIR(its.st_mode) and its.st_uid == os.geteuid()
    if is_ours and not its.st_mode & 0o022:
        if stat.S_IMODE(its.st_mode) != modes.FOLDER:
            os.chmod(folder, modes.FOLDER)
    else:
        raise StartError(
            f"{folder} must be a folder that only you can use, but it is a {_kind(its.st_mode)} of user {its.st_uid} "
            f"with mode {stat.S_IMODE(its.st_mode):o}: remove it"
        )


def _kind(mode: int) -> str:
    return "link" if stat.S_ISLNK(mode) else "folder" if stat.S_ISDIR(mode) else "file"


def copy_of(file: BinaryIO, path: Path) -> BinaryIO:
    """Copy an open but deleted file to a new path. Return the copy, open and positioned at its end.

    Raises:
        OSError: the copy cannot be written. Then no file remains at the path.
    """
    copy = open(path, "w+b", buffering=0, opener=modes.opener)  # noqa: SIM115  # closed by the caller
    try:
        file.seek(0)
        shutil.copyfileobj(file, copy)
    except BaseException:
        file.seek(0, os.SEEK_END)
        copy.close()
        path.unlink(missing_ok=True)
        raise
    return copy


def runtime() -> str:
    """Return the folder for small files of running sessions: sockets, connection files, stacks.

    It is in the runtime directory (XDG_RUNTIME_DIR). If that is unusable, or socket paths in it would be too long, the
    directory for temporary files is used.
    """
    with contextlib.suppress(UsageError, OSError):
        if len(os.fsencode(folder := str(entries.folder()))) <= _LONGEST:
            return folder
    return temporary()


def temporary() -> str:
    """Return the directory for temporary files. It is recreated if missing, as the TMPDIR of a batch job may be.

    Raises:
        StartError: Python finds no such directory that can be written to.
    """
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError as error:
        raise StartError(
            "no directory for temporary files can be written to: set TMPDIR to one before the notebook starts "
            f"({error.strerror})"
        ) from error
    if not os.path.isdir(folder):
        with contextlib.suppress(OSError, StartError):
            restore(folder)
    return folder


_NOT_OF_A_FOLDER = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)  # another folder would not help


@contextlib.contextmanager
def writing_to(folder: str | os.PathLike[str], variable: str = "") -> Iterator[None]:
    """Context that writes to a folder of this machine. Errors of this folder become one sentence.

    Args:
        folder: the folder.
        variable: environment variable that sets another folder; "" for the one of the runtime or temporary directory.

    Raises:
        StartError: the folder cannot be written to.

    Example:
        >>> with writing_to("/proc", "TMPDIR"):
        ...     open("/proc/none", "w")
        Traceback (most recent call last):
        ddp_notebook.errors.StartError: /proc, where this session keeps files, cannot be written to: No such file or \
directory; set TMPDIR to a folder that you can write to before the notebook starts
    """
    try:
        yield
    except OSError as error:
        if error.errno in _NOT_OF_A_FOLDER:
            raise
        raise StartError(cannot_write(os.fspath(folder), error, variable)) from error


def cannot_write(folder: str, error: OSError, variable: str = "") -> str:
    """Describe why this process cannot write to a folder of this machine, and a remedy; see `writing_to`.

    Example:
        >>> cannot_write("/tmp", OSError(errno.ENOSPC, "No space left on device"))
        'no space is left in /tmp, where this session keeps files: delete some files there'
    """
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space is left in {folder}, where this session keeps files: delete some files there"
    variable = variable or ("TMPDIR" if folder == tempfile.gettempdir() else entries.VARIABLE)
    return (
        f"{folder}, where this session keeps files, cannot be written to: {error.strerror or error}; set {variable} to "
        "a folder that you can write to before the notebook starts"
    )
