"""The recording of the ranks in files: batches in the order of arrival.

    rank u4  nbytes u8  batch

A renumbering of ranks is written in place of a batch, under a number that no rank has. There are several files of equal
size. When they reach their limit together, the oldest is removed. Its texts are kept, since later rows need them, and
its rows are counted as dropped. Batches that a full disk rejects are handled in the same way.
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
Part = tuple[str, int]  # path and valid size of a file


class KeptRecording:
    """Files of one session. The caller must serialise all calls.

    Args:
        folder: of the files.
        limit_bytes: of all files together.
    """

    def __init__(self, folder: str, limit_bytes: int) -> None:
        self.trouble = ""  # reason why data was left out last
        self._folder = Path(folder)
        self._part_bytes = max(1, limit_bytes // _FILES)
        self._number = 0
        self._parts: dict[Path, BinaryIO] = {}  # all open, so that none is lost if its name is removed
        self._closed: list[Part] | None = None  # the parts at the time of `close`
        self._file: BinaryIO | None = None  # the newest file, while it is written to
        self._written = 0  # bytes in the newest file
        self._left: dict[tuple[int, int], Batch] = {}  # key: rank and stream; remains of removed batches

    def put(self, rank: int, data: bytes) -> None:
        """Write a batch of a rank."""
        self._put(rank, data)

    def renumber(self, stayed: Mapping[int, int], world_size: int) -> None:
        """Record that ranks have been renumbered, see `Renumbered`."""
        self._put(_NO_RANK, Renumbered(stayed, world_size).encode())

    def _put(self, rank: int, data: bytes) -> None:
        try:
            whole = _HEAD.pack(rank, len(data)) + data
            if self._file is None or (self._written and self._written + len(whole) > self._part_bytes):
                self._begin_file()
            assert self._file is not None
            if self._file.write(whole) < len(whole):  # a disk that becomes full accepts a part
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._written += len(whole)
        except (OSError, StartError) as error:
            self._give_up_file()
            self.trouble = f"{self._folder}: {error.strerror if isinstance(error, OSError) else error}"
            self._leave_out(rank, data)

    def parts(self) -> list[Part]:
        """Return paths and sizes of the stored parts."""
        if self._closed is not None:
            return self._closed
        self.restore()
        sizes = {path: os.fstat(file.fileno()).st_size for path, file in self._parts.items()}
        if self._file is not None:
            sizes[list(sizes)[-1]] = self._written  # the file may end with an incomplete batch
        return [(str(path), size) for path, size in sizes.items()]

    def restore(self) -> None:
        """Write the files again if a cleanup has removed them: notebooks read them by name."""
        for path, file in self._parts.items():
            if os.fstat(file.fileno()).st_nlink:
                continue
            try:
                private.restore(str(self._folder))
                again = private.copy_of(file, path)
            except (OSError, StartError) as error:  # the next call tries again
                self.trouble = f"{self._folder}: {error.strerror if isinstance(error, OSError) else error}"
                return
            self._parts[path] = again
            if file is self._file:
                self._file = again
            file.close()

    def left(self) -> list[tuple[int, bytes]]:
        """Return the remains of removed batches, by rank. They are older than all stored batches."""
        return [(batch.rank, encode(batch)) for batch in self._left.values()]

    def close(self) -> None:
        """Close the files after the end of the recording. They are removed with their folder."""
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
        """Cut off an incomplete batch, and remove an empty file.

        Otherwise a full disk would create empty files, which displace files with data.
        """
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
        except CodecError:  # the notebook could not read it either
            return
        key = new.rank, new.stream
        before = self._left.get(key, Batch(rank=new.rank, stream=new.stream))
        before.texts.update(new.texts)
        dropped = before.dropped + new.dropped
        self._left[key] = Batch(rank=new.rank, stream=new.stream, dropped=dropped, texts=before.texts)


def batches(parts: list[Part]) -> Iterator[tuple[int, bytes] | Renumbered]:
    """Yield the batches of files with their ranks. All files are opened at once, so that none is removed before it is
    read.
    """
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
