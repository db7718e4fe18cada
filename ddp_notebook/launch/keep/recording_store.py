"""What ranks have recorded, in files: batches as they came, one behind the other.

    rank u4  nbytes u8  batch

Where ranks got other numbers, that is written in the place of a batch, under a number that no rank has.
There are several files of equal size. When all together are as large as they may be, the oldest goes; its texts stay,
since later rows need them, and its rows are counted as dropped. So it is for what a full disk does not take.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from ddp_notebook.errors import StartError
from ddp_notebook.records.codec import Batch, CodecError, encode, skim
from ddp_notebook.records.renumbering import Renumbered
from ddp_notebook.registry import modes, private

_HEAD = struct.Struct("<IQ")
_FILES = 32
_NO_RANK = 0xFFFFFFFF
Part = tuple[str, int]  # a file, and how much of it


class KeptRecording:
    """Of one session. The caller lets one thread at a time use it.

    Args:
        folder: in which the files are made.
        limit_bytes: of all of them.
    """

    def __init__(self, folder: str, limit_bytes: int) -> None:
        self.trouble = ""  # why something was left out last
        self._folder = Path(folder)
        self._part_bytes = max(1, limit_bytes // _FILES)
        self._number = 0
        self._parts: dict[Path, BinaryIO] = {}  # all open, so that none is lost with its name
        self._closed: list[Part] | None = None  # the parts at the time of `close`
        self._file: BinaryIO | None = None  # the last of them, while it is written to
        self._written = 0  # into the last file
        self._left: dict[tuple[int, int], Batch] = {}  # by rank and stream: what is left of batches that went

    def put(self, rank: int, data: bytes) -> None:
        """Keep a batch of a rank."""
        self._put(rank, data)

    def renumber(self, stayed: Mapping[int, int], world_size: int) -> None:
        """Ranks have other numbers from now on, see `Renumbered`."""
        self._put(_NO_RANK, Renumbered(stayed, world_size).encode())

    def _put(self, rank: int, data: bytes) -> None:
        try:
            whole = _HEAD.pack(rank, len(data)) + data
            if self._file is None or (self._written and self._written + len(whole) > self._part_bytes):
                self._begin_file()
            assert self._file is not None
            if self._file.write(whole) < len(whole):  # a disk that becomes full takes a part of it
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._written += len(whole)
        except (OSError, StartError) as error:
            self._give_up_file()
            self.trouble = f"{self._folder}: {error.strerror if isinstance(error, OSError) else error}"
            self._leave_out(rank, data)

    def parts(self) -> list[Part]:
        """All that is kept now."""
        if self._closed is not None:
            return self._closed
        self.restore()
        sizes = {path: os.fstat(file.fileno()).st_size for path, file in self._parts.items()}
        if self._file is not None:
            sizes[list(sizes)[-1]] = self._written  # a part of a batch may follow
        return [(str(path), size) for path, size in sizes.items()]

    def restore(self) -> None:
        """Write the files again that a cleaner has removed: notebooks read them by name."""
        for path, file in self._parts.items():
            if os.fstat(file.fileno()).st_nlink:
                continue
            try:
                private.restore(str(self._folder))
                again = private.copy_of(file, path)
            except (OSError, StartError) as error:  # it can be tried again
                self.trouble = f"{self._folder}: {error.strerror if isinstance(error, OSError) else error}"
                return
            self._parts[path] = again
            if file is self._file:
                self._file = again
            file.close()

    def left(self) -> list[tuple[int, bytes]]:
        """What is left of batches that went, by rank; older than all that is kept."""
        return [(batch.rank, encode(batch)) for batch in self._left.values()]

    def close(self) -> None:
        """Nothing more is recorded. The files go with their folder."""
        self._give_up_file()
        self._closed = self.parts()
        for file in self._parts.values():
            file.close()
        self._parts.clear()

    def _begin_file(self) -> None:
        self._give_up_file()
        while len(self._parts) >= _FILES:
            oldest = next(iter(self._parts))
            with self._parts.pop(oldest) as file:
                file.seek(0)
                for rank, data in _batches_of(file, os.fstat(file.fileno()).st_size):
                    self._leave_out(rank, data)
            oldest.unlink(missing_ok=True)
        private.restore(str(self._folder))
        path = self._folder / f"recorded.{self._number}"
        self._file, self._written = open(path, "w+b", buffering=0, opener=modes.opener), 0  # noqa: SIM115
        self._parts[path] = self._file
        self._number += 1

    def _give_up_file(self) -> None:
        """What was written of a batch that did not fit is no part of it. An empty file is none, or those of a full disk
        would take the places of what was kept before."""
        if self._file is not None:
            os.ftruncate(self._file.fileno(), self._written)
            self._file = None
            if not self._written:
                path, file = self._parts.popitem()
                file.close()
                path.unlink(missing_ok=True)

    def _leave_out(self, rank: int, data: bytes) -> None:
        if rank == _NO_RANK:
            now = {before: rank for rank, before in Renumbered.decode(data).stayed.items()}
            self._left = {
                (its := now.get(rank, rank), stream): replace(batch, rank=its)
                for (rank, stream), batch in self._left.items()
            }
            return
        try:
            new = skim(data)
        except CodecError:  # the notebook would not read it either
            return
        key = new.rank, new.stream
        before = self._left.get(key, Batch(rank=new.rank, stream=new.stream))
        before.texts.update(new.texts)
        dropped = before.dropped + new.dropped
        self._left[key] = Batch(rank=new.rank, stream=new.stream, dropped=dropped, texts=before.texts)


def batches(parts: list[Part]) -> Iterator[tuple[int, bytes] | Renumbered]:
    """The batches of files, with their ranks. All files are opened at once, so that none goes meanwhile."""
    for rank, data in _read(parts):
        yield Renumbered.decode(data) if rank == _NO_RANK else (rank, data)


def _read(parts: list[Part]) -> Iterator[tuple[int, bytes]]:
    files = [(open(path, "rb"), nbytes) for path, nbytes in parts if os.path.exists(path)]  # noqa: SIM115
    try:
        for file, nbytes in files:
            yield from _batches_of(file, nbytes)
    finally:
        for file, _ in files:
            file.close()


def _batches_of(file: BinaryIO, nbytes: int) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < nbytes:
        rank, length = _HEAD.unpack(file.read(_HEAD.size))
        yield rank, file.read(length)
        at += _HEAD.size + length
