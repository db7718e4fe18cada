"""Write a file atomically: it appears when it is complete."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from ddp_notebook.errors import CannotWriteError, UsageError
from ddp_notebook.records import shortages


def in_a_folder(path: str | os.PathLike[str]) -> Path:
    """Check the path of a file to write, and return it with `~` expanded.

    Raises:
        UsageError: the folder does not exist, or the file name is invalid.
    """
    if not isinstance(given := os.fspath(path) if isinstance(path, os.PathLike) else path, str):
        raise UsageError(f"path must be text or a path, got {path!r:.60}")
    path = Path(given).expanduser()
    try:
        is_valid = bool(path.name) and b"\0" not in os.fsencode(path)
        has_folder = is_valid and path.parent.is_dir() and [path.is_dir()]  # the latter raises if the name is too long
    except (OSError, ValueError):  # the name is too long, or contains half of a surrogate pair
        is_valid, has_folder = False, []
    if not is_valid:
        raise UsageError(f"path must end in a valid file name such as run.npz, got {given!r:.60}")
    if not has_folder:
        raise UsageError(f"the folder {str(path.parent)!r} for {path.name} does not exist; create it first")
    return path


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write to a temporary file next to the path, then rename it. An existing file is replaced atomically, or not
    changed.

    Args:
        path: path in an existing folder.
        write: called once with the open file.

    Raises:
        CannotWriteError: the file cannot be written. No part of it is left.
        Exception: any other error of `write`.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with part.open("xb") as file:
            write(file)
        part.replace(path)
    except OSError as error:
        raise cannot_write(path, error) from error  # create the error first, while the disk is still full
    finally:
        part.unlink(missing_ok=True)


def cannot_write(path: Path, error: OSError, advice: str = "name another folder") -> CannotWriteError:
    """Return the error for a file that cannot be written on the notebook's machine, as one sentence.

    Args:
        path: path of the file.
        error: error of the system.
        advice: a remedy.

    Example:
        >>> str(cannot_write(Path("/mnt/run.json"), OSError(30, "Read-only file system")))
        '/mnt/run.json cannot be written here: Read-only file system; name another folder'
    """
    found = shortages.sentences("the notebook", shortages.kinds(error), paths=[str(path.parent)])
    why = "; ".join(found) or error.strerror or str(error)
    return CannotWriteError(f"{path} cannot be written here: {why}; {advice}")
