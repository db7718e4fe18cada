"""Messages about files of ranks. Their reply is `Pulled`, with the bytes or with a transfer to fetch them.

notebook -> rank
----------------
ListFiles  list the files that match a path or pattern
ReadFiles  read parts of files
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ddp_notebook.messages.encoding import Message
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401


@dataclass(frozen=True, slots=True, kw_only=True)
class ListFiles(Message):
    """List the files that match a path or pattern, see `rank.files.find`. The reply contains JSON."""

    request: int
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadFiles(Message):
    """Read parts of files. The reply contains the parts one after the other, see `rank.files.read`."""

    request: int
    memory: str = ""  # as for `Pull`
    parts: list[list[Any]]  # each: path, offset, number of bytes, size and time of the file
