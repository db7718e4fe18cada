"""One file written whole: it is there once all of it is written, and never half of it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from ddp_notebook.errors import UsageError


def in_a_folder(path: str | os.PathLike[str]) -> Path:
    """The path of a file to write, `~` expanded.

    Raises:
        UsageError: the folder is not there.
    """
    path = Path(path).expanduser()
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {str(path.parent)!r} to write {path.name} to; make it first")
    return path


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write beside the path, then rename: a file that is there is replaced at once, or stays as it was.

    Args:
        path: in a folder that is there.
        write: called once with the open file.

    Raises:
        OSError: the file could not be written; so does whatever `write` raises. Nothing is left beside the path.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with part.open("xb") as file:
            write(file)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
