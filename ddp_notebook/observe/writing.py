"""One file written whole: it is there once all of it is written, and never half of it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from ddp_notebook.errors import CannotWriteError, UsageError
from ddp_notebook.records import shortages


def in_a_folder(path: str | os.PathLike[str]) -> Path:
    """The path of a file to write, `~` expanded.

    Raises:
        UsageError: the folder is not there, or no file can have this name.
    """
    if not isinstance(given := os.fspath(path) if isinstance(path, os.PathLike) else path, str):
        raise UsageError(f"a file is named by text or a path, got {path!r:.60}")
    path = Path(given).expanduser()
    if not path.name or "\0" in given:
        raise UsageError(f"no file can be named {given!r}; write a name such as run.npz")
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {str(path.parent)!r} to write {path.name} to; make it first")
    return path


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write beside the path, then rename: a file that is there is replaced at once, or stays as it was.

    Args:
        path: in a folder that is there.
        write: called once with the open file.

    Raises:
        CannotWriteError: the file cannot be written. No part of it is left.
        whatever else `write` raises.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with part.open("xb") as file:
            write(file)
        part.replace(path)
    except OSError as error:
        raise cannot_write(path, error) from error  # made before the part is removed, while the disk is still full
    finally:
        part.unlink(missing_ok=True)


def cannot_write(path: Path, error: OSError, advice: str = "name another folder") -> CannotWriteError:
    """Return the error for a file that cannot be written on the notebook's machine, in one sentence.

    Args:
        path: of the file.
        error: raised by the system.
        advice: what helps.

    Example:
        >>> str(cannot_write(Path("/mnt/run.json"), OSError(30, "Read-only file system")))
        '/mnt/run.json cannot be written here: Read-only file system; name another folder'
    """
    found = shortages.sentences("the notebook", shortages.kinds(error), paths=[str(path.parent)])
    why = "; ".join(found) or error.strerror or str(error)
    return CannotWriteError(f"{path} cannot be written here: {why}; {advice}")
