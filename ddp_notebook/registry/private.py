"""Folders for this user only: where they are, and how one is made again after a cleaner has removed it."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import BinaryIO

from ddp_notebook.errors import StartError, UsageError
from ddp_notebook.registry import entries, modes

_LONGEST = 70  # bytes of the runtime directory's path: the path of a Unix socket below it may have 108


def restore(folder: str) -> None:
    """Make a folder again that was removed, and its parents, with mode 0700. An existing folder is only checked.

    Raises:
        StartError: the path is a link now, belongs to another user, or others can write to it.
        OSError: it cannot be made.

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
    except FileExistsError:  # from before, or another process has made it just now
        check(folder)


def check(folder: str) -> None:
    """Check that no other user can use a folder, and give it mode 0700 if others can at most read it. Libraries make
    folders again too, with their own mode.

    Raises:
        StartError: it is a link, belongs to another user, or others can write to it.
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
    """Copy an open file that has lost its name to this path. The result is open, at its end.

    Raises:
        OSError: it cannot be written; then nothing is left at the path.
    """
    copy = open(path, "w+b", buffering=0, opener=modes.opener)  # noqa: SIM115  # for the caller
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
    """Return the folder for small files that sessions need as long as they live: sockets, connection files, stacks.

    It is in the runtime directory (XDG_RUNTIME_DIR). Where that cannot be used, or the paths of sockets would get too
    long there, it is the directory for temporary files.
    """
    with contextlib.suppress(UsageError, OSError):
        if len(os.fsencode(folder := str(entries.folder()))) <= _LONGEST:
            return folder
    return temporary()


def temporary() -> str:
    """Return the directory for temporary files. It is made again if it is missing, as TMPDIR of a batch job may be."""
    folder = tempfile.gettempdir()
    if not os.path.isdir(folder):
        with contextlib.suppress(OSError, StartError):
            restore(folder)
    return folder


def cannot_write(folder: str, error: OSError) -> str:
    """Return a sentence that says why a folder of this machine cannot be written to, and what helps.

    Example:
        >>> cannot_write("/tmp", OSError(errno.ENOSPC, "No space left on device"))
        'no space is left in /tmp, where this session keeps files: delete some files there'
    """
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space is left in {folder}, where this session keeps files: delete some files there"
    return f"{folder}, where this session keeps files, cannot be written to: {error.strerror or error}"
