"""Messages about files of ranks. Their answers are `Pulled`, which hold the bytes or tell where the rank does.

notebook -> rank
----------------
ListFiles  which files have this name?
ReadFiles  what is in these?
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ddp_notebook.messages.encoding import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class ListFiles(Message):
    """Answer with JSON: the files of this name or pattern, see `rank.files.find`."""

    request: int
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadFiles(Message):
    """Answer with these parts of files, one behind the other, see `rank.files.read`."""

    request: int
    memory: str = ""  # as for `Pull`
    parts: list[list[Any]]  # of each the path, offset and number of bytes, and the file's size and time
