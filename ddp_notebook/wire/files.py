"""What the notebook asks a rank about files. Both are answered with `events.Pulled`, which holds the bytes, or tells where
the rank does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ddp_notebook.wire.events import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class ListFiles(Message):
    """Answer with JSON: the files of this name or pattern, see `rank.files.find`."""

    request: int
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadFiles(Message):
    """Answer with these parts of files, one behind the other, see `rank.files.read`."""

    request: int
    parts: list[list[Any]]  # of each the path, offset and number of bytes, and the file's size and time
