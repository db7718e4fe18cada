"""Local folders for this user only, removed at the end of the notebook's process at the latest.

Small files are in the runtime directory, large files (logs, profiles) in the directory for temporary files. Cleanup
services and users empty both, so `registry.private.restore` creates a folder again before a file is written into it.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil

from ddp_notebook.errors import StartError
from ddp_notebook.launch.transports import cleanup_process
from ddp_notebook.registry import modes, private

_made: dict[str, tuple[int, int]] = {}  # folder -> the process that made it, and the descriptor of its lock or -1


def make(prefix: str, within: str | None = None, *, is_large: bool = False, is_guarded: bool = True) -> str:
    """Make a folder with mode 0700 that lives as long as this process at most.

    Args:
        prefix: of its name.
        within: the parent folder, whose owner removes it if this process is killed. It is made again if it is missing.
            None: the runtime directory.
        is_large: it is for large files. Without `within` it is then in the directory for temporary files.
        is_guarded: another process removes it if this one is killed. Unused if `within` is given.

    Raises:
        StartError: it cannot be made; the message names the parent folder and the reason.

    Example:
        >>> folder = make("ddp_notebook-")
        >>> os.path.isdir(folder)
        True
        >>> remove(folder)
        >>> os.path.isdir(folder)
        False
    """
    parent = within or (private.temporary() if is_large else private.runtime())
    try:
        if within is not None:
            private.restore(within)
        folder = modes.new_folder(prefix, parent)
    except OSError as error:
        raise StartError(private.cannot_write(parent, error)) from error
    _made[folder] = os.getpid(), _lock(folder) if is_large else -1
    if within is None and is_guarded:
        cleanup_process.guard(folder)
    return folder


def remove(folder: str) -> None:
    """Remove a folder with its contents. It is no error if the folder does not exist."""
    shutil.rmtree(folder, ignore_errors=True)
    _, lock = _made.pop(folder, (0, -1))
    if lock >= 0:
        os.close(lock)
    cleanup_process.release(folder)


def _lock(folder: str) -> int:
    """Lock a folder: systemd-tmpfiles does not clean locked folders. Returns the descriptor that holds the lock, or -1.

    Source: https://systemd.io/TEMPORARY_DIRECTORIES/
    """
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return descriptor
    return -1


@atexit.register
def _remove_the_rest() -> None:
    """Remove the folders of a session that was not stopped. A forked child of the notebook removes nothing."""
    for folder in [folder for folder, (pid, _) in _made.items() if pid == os.getpid()]:
        remove(folder)
