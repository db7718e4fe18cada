"""Folders of this machine that end with the notebook's process, where no host server of this machine removes them."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

from ddp_notebook.launch.ways import guardian

_made: dict[str, int] = {}  # the process that made each


def make(prefix: str, within: str | None = None) -> str:
    """Make a folder that only this user can read (mode 700), for as long as this process lives at most.

    Args:
        prefix: how its name begins.
        within: the folder that it is to be in, whose owner removes it where this process is killed; None: that of
            temporary files.

    Example:
        >>> folder = make("ddp_notebook-")
        >>> os.path.isdir(folder)
        True
        >>> remove(folder)
        >>> os.path.isdir(folder)
        False
    """
    folder = tempfile.mkdtemp(prefix=prefix, dir=within)
    _made[folder] = os.getpid()
    if within is None:
        guardian.guard(folder)
    return folder


def remove(folder: str) -> None:
    """Remove it, with all that is in it. Doing it twice is no error."""
    shutil.rmtree(folder, ignore_errors=True)
    _made.pop(folder, None)
    guardian.release(folder)


@atexit.register
def _remove_the_rest() -> None:
    """A session was not stopped. (A forked child of the notebook ends too: the folders are not its own.)"""
    for folder in [folder for folder, pid in _made.items() if pid == os.getpid()]:
        remove(folder)
