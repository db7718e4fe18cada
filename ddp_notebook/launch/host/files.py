"""Files that the notebook sends to a host: choose the folder, compare existing files, and write new ones.

A file is written under another name and renamed when it is complete, so no reader sees a part of it. A folder in the
home directory has only the name of the notebook's folder. It is used if it is empty, or if a note in it names the same
notebook folder. Links to folders are not followed, because their targets are outside the folder.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ddp_notebook.messages.encoding import Message
from ddp_notebook.messages.hosts import (
    CompareReply,
    CompareRequest,
    DiscardRequest,
    DoneReply,
    FileDigest,
    FileErrorReply,
    FilePart,
    FolderReply,
    FolderRequest,
    FoundFile,
    MarkRequest,
    NamesReply,
    NamesRequest,
    StatReply,
    StatRequest,
    WriteRequest,
)
from ddp_notebook.records.marker import MARK
from ddp_notebook.registry import modes

NOTE = f"{MARK}synced"  # a file in a folder of the home directory that names the notebook's folder
READ_BYTES = 1 << 20
_STEP_S = 0.05  # longest time without other work of the server


def digest(path: str) -> Iterator[str]:
    """Yield "" after each step, then the digest of a file's content.

    Raises:
        OSError: it cannot be read.
    """
    content = hashlib.blake2b(digest_size=20)
    with open(path, "rb") as file:
        while piece := file.read(READ_BYTES):
            content.update(piece)
            yield ""
    yield content.hexdigest()


class Files:
    """The files of one host server."""

    def __init__(self) -> None:
        self._begun: dict[str, str] = {}  # target -> temporary file
        self._marks: list[str] = []
        self._numbers = itertools.count()
        self._token = secrets.token_hex(4)  # hosts may share a folder
        handlers: dict[type[Message], Callable[[Any], Message | _Comparing]] = {
            FolderRequest: self._settle,
            MarkRequest: self._mark,
            NamesRequest: self._names,
            StatRequest: self._stat,
            CompareRequest: lambda request: _Comparing(request.folder, request.files),
            WriteRequest: self._write,
            DiscardRequest: self._discard,
        }
        # handlers that return the reply
        self.handlers = {kind: self._told(handle) for kind, handle in handlers.items()}

    def _told(self, handle: Callable[[Any], Message | _Comparing]) -> Callable[[Any], Message | _Comparing]:
        """Return the handler with a reply in place of an OSError."""

        def handle_or_tell(request: Any) -> Message | _Comparing:
            try:
                return handle(request)
            except OSError as error:
                return failed(error)

        return handle_or_tell

    def discard(self) -> None:
        """Remove incomplete files and marker files."""
        for target in list(self._begun):
            self._remove(target)
        while self._marks:
            _unlink(self._marks.pop())

    def _settle(self, request: FolderRequest) -> FolderReply:
        path, marker = request.path, request.marker
        candidates = [path, os.path.join(os.path.expanduser("~"), os.path.basename(path))]
        for folder in candidates:
            if marker and os.path.lexists(os.path.join(folder, marker)):
                return FolderReply(folder=folder, is_shared=True)
        if not _can_hold_files(path):
            return _settle_at_home(candidates[1], path)
        return FolderReply(folder=path)

    def _mark(self, request: MarkRequest) -> DoneReply:
        path = os.path.join(request.folder, request.name)
        os.close(modes.opener(path, os.O_CREAT | os.O_WRONLY))
        self._marks.append(path)
        return DoneReply()

    def _names(self, request: NamesRequest) -> NamesReply:
        return NamesReply(names=[one for one in request.names if os.path.lexists(os.path.join(request.folder, one))])

    def _stat(self, request: StatRequest) -> StatReply:
        return StatReply(found=[_found(request.folder, path) for path in request.paths])

    def _write(self, request: WriteRequest) -> DoneReply | FileErrorReply:
        data, at = memoryview(request.data), 0
        for part in request.parts:
            target = os.path.join(request.folder, part.path)
            try:
                if _is_behind(request.folder, part.path):
                    raise OSError(errno.ELOOP, "a folder on the way to it is a link")
                if part.discard:
                    self._remove(target)
                elif part.link:
                    os.symlink(part.link, self._begin(target))
                    os.replace(self._begun[target], target)
                    del self._begun[target]
                else:
                    self._write_part(target, part, data[at : at + part.nbytes])
            except OSError as error:
                self._remove(target)
                return failed(error, part.path)
            at += part.nbytes
        return DoneReply()

    def _write_part(self, target: str, part: FilePart, data: memoryview) -> None:
        if part.is_first:
            self._begin(target)
        name = self._begun.get(target)
        if name is None:
            return  # an earlier part has failed, which was reported
        fd = modes.opener(name, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        try:
            while data:
                data = data[os.write(fd, data) :]
            if part.end is not None:
                os.fchmod(fd, part.end[0])
        finally:
            os.close(fd)  # may raise an error if the disk is full
        if part.end is not None:
            os.utime(name, ns=(part.end[1], part.end[1]))
            os.replace(name, target)
            del self._begun[target]

    def _begin(self, target: str) -> str:
        self._remove(target)
        folder = os.path.dirname(target)
        os.makedirs(folder, exist_ok=True)
        self._begun[target] = name = os.path.join(folder, f"{MARK}{self._token}-{next(self._numbers)}")
        return name

    def _remove(self, target: str) -> None:
        if (name := self._begun.pop(target, None)) is not None:
            _unlink(name)

    def _discard(self, _: DiscardRequest) -> DoneReply:
        self.discard()
        return DoneReply()


class _Comparing:
    """Compares files with digests in small steps, because the server has other work too."""

    def __init__(self, folder: str, files: Sequence[FileDigest]) -> None:
        self._steps = self._compare(folder, files)
        self._same: list[bool] = []

    def advance(self) -> CompareReply | None:
        until = time.monotonic() + _STEP_S
        for _ in self._steps:
            if time.monotonic() > until:
                return None
        return CompareReply(same=self._same)

    def _compare(self, folder: str, files: Sequence[FileDigest]) -> Iterator[str]:
        for path, wanted, mtime_ns in files:
            target, its = os.path.join(folder, path), ""
            try:
                for its in digest(target):
                    yield its
                if its == wanted:
                    os.utime(target, ns=(mtime_ns, mtime_ns))  # next time the size and the time are enough
            except OSError:  # it cannot be read or changed: if it differs, it is sent again
                pass
            self._same.append(its == wanted)


def failed(error: OSError, path: str = "") -> FileErrorReply:
    """Return the reply for an operating-system error."""
    return FileErrorReply(
        path=path or str(error.filename or ""), number=error.errno or errno.EIO, error=error.strerror or str(error)
    )


def _can_hold_files(path: str) -> bool:
    """Return whether a folder exists or can be created, and files can be created in it."""
    try:
        os.makedirs(path, exist_ok=True)
    except OSError:
        return False
    return os.access(path, os.W_OK | os.X_OK)


def _settle_at_home(folder: str, path: str) -> FolderReply:
    """Use a folder of the home directory for the notebook's folder, unless it may hold other files."""
    os.makedirs(folder, exist_ok=True)
    note = os.path.join(folder, NOTE)
    try:
        with open(note, errors="surrogateescape") as file:
            its = file.read().strip()
    except FileNotFoundError:
        # hosts with a shared home directory may do this at the same time
        if any(not name.startswith(MARK) for name in os.listdir(folder)):
            return FolderReply(folder=folder, is_of="")
        its = ""
    if its not in ("", path):
        return FolderReply(folder=folder, is_of=its)
    with open(note, "w", errors="surrogateescape") as file:
        file.write(f"{path}\n")
    return FolderReply(folder=folder)


def _is_behind(folder: str, path: str) -> bool:
    """Return whether a folder on the path from this folder to a file in it is a link."""
    *above, _ = path.split("/")
    return any(os.path.islink(os.path.join(folder, *above[:count])) for count in range(1, len(above) + 1))


def _found(folder: str, name: str) -> FoundFile | None:
    if _is_behind(folder, name):
        return FoundFile("behind", 0, 0, 0)
    path = os.path.join(folder, name)
    try:
        its = os.lstat(path)
        link = os.readlink(path) if stat.S_ISLNK(its.st_mode) else ""
    except (FileNotFoundError, NotADirectoryError):
        return None
    kind = "link" if link else "file" if stat.S_ISREG(its.st_mode) else "other"
    return FoundFile(kind, its.st_size, its.st_mtime_ns, stat.S_IMODE(its.st_mode), link)


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
