"""Upload a folder to one host: compare the files first, then send them in pieces.

The pieces use the stream to the host server, for every transport. The number of pieces in flight is limited to those
that the link accepts in a quarter of a second. Other messages do not wait longer than that.
"""

from __future__ import annotations

import errno
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TypeVar

from ddp_notebook.errors import HostError
from ddp_notebook.launch.host.files import digest
from ddp_notebook.launch.host.host import Host
from ddp_notebook.launch.sync.selection import SyncEntry, SyncFilter
from ddp_notebook.messages.encoding import Message
from ddp_notebook.messages.hosts import (
    CompareReply,
    CompareRequest,
    DiscardRequest,
    FileDigest,
    FileErrorReply,
    FilePart,
    FoundFile,
    StatReply,
    StatRequest,
    WriteRequest,
)

_EXECUTABLE = 0o111


@dataclass(slots=True)
class Plan:
    """Upload plan for one host."""

    send: list[SyncEntry] = field(default_factory=list)
    # same size, different times: compare the content
    ask: list[tuple[SyncEntry, FoundFile]] = field(default_factory=list)
    newer: list[str] = field(default_factory=list)  # files that are newer on the host, and are not replaced
    in_the_way: list[str] = field(default_factory=list)  # names that are not files on the host
    behind: list[str] = field(default_factory=list)  # files below a folder that is a link on the host
    there: int = 0  # number of equal files

    def add(self, entries: Sequence[SyncEntry], found: Sequence[FoundFile | None], *, overwrite: bool) -> None:
        """Plan by size and time. Files in `ask` must be compared by content.

        Args:
            entries: local files.
            found: files of the same names on the host.
            overwrite: also replace files that are newer on the host.
        """
        for entry, its in zip(entries, found, strict=True):
            if its is None:
                self.send.append(entry)
            elif its.kind == "behind":
                self.behind.append(entry.path)
            elif its.kind == "other":
                self.in_the_way.append(entry.path)
            elif entry.link or its.kind == "link":
                self.add_compared(entry, its, is_same=entry.link == its.link, overwrite=overwrite)
            elif entry.size == its.size and entry.mtime_ns != its.mtime_ns:
                self.ask.append((entry, its))
            else:
                self.add_compared(entry, its, is_same=entry.size == its.size, overwrite=overwrite)

    def add_compared(self, entry: SyncEntry, its: FoundFile, *, is_same: bool, overwrite: bool) -> None:
        """Plan for a file that exists on the host.

        Args:
            entry: the local file.
            its: the file on the host.
            is_same: the content is the same.
            overwrite: also replace a file that is newer on the host.
        """
        if is_same and (entry.link or (entry.mode ^ its.mode) & _EXECUTABLE == 0):
            self.there += 1
        elif is_same or overwrite or its.mtime_ns <= entry.mtime_ns:
            self.send.append(entry)
        else:
            self.newer.append(entry.path)


_R = TypeVar("_R", bound=Message)
_PIECE_BYTES = 256 << 10
_MOST_PARTS = 500  # in a piece
_COMPARED = 1000  # files per request
_HASHED_BYTES = 256 << 20  # bytes to compare per request
_MOST_PIECES = 16  # in flight
_QUICK_S = 0.25  # from a piece to its reply
_REPLY_S = 60.0
_HASH_S = 600.0
_FIXES = {
    errno.ENOSPC: "the disk of that host is full; free space, or list files that are not needed there in a .gitignore",
    errno.EDQUOT: (
        "your quota on that host is used up; free space, or list files that are not needed there in a .gitignore"
    ),
    errno.EACCES: "you may not write it on that host; remove it there, or get the permission",
    errno.EPERM: "you may not write it on that host; remove it there, or get the permission",
    errno.EROFS: (
        "it is on a read-only file system; sync a folder with another name, which then goes to your home folder there"
    ),
    errno.ENOTDIR: "a file has the name of a needed folder; move the file away on that host",
    errno.EEXIST: "a file has the name of a needed folder; move the file away on that host",
    errno.EISDIR: "a folder has the name of the file; move the folder away on that host",
    errno.ELOOP: "a sync does not follow links; move the link away on that host",
    errno.ENAMETOOLONG: "the name is too long for that host; use a shorter one",
}


class HostUpload:
    """Sends changed files to one host. `run` needs its own thread; other threads may read the attributes.

    Args:
        host: its folder must be known.
        folder: on the host.
        choice: the files to send.
        overwrite: also replace files that are newer on the host.
        check: called often; an exception from it ends the upload, and no incomplete file is left.
    """

    def __init__(
        self, host: Host, folder: str, choice: SyncFilter, *, overwrite: bool, check: Callable[[], None]
    ) -> None:
        self.plan = Plan()
        self.nbytes = 0  # to send, as far as known
        self.sent_bytes = 0
        self.sent: list[str] = []  # files
        self.changing: list[str] = []  # files that changed while they were read
        self.took_s = 0.0
        self._host = host
        self._folder = folder
        self._choice = choice
        self._overwrite = overwrite
        self._check = check
        # pieces in flight: time of sending, reply, request
        self._under_way: deque[tuple[float, Future[Message], Message]] = deque()
        self._window = 1

    def run(self) -> None:
        """Compare and send.

        Raises:
            HostError: the host has ended, or cannot write a file; the message names the file and a fix.
        """
        began = time.monotonic()
        try:
            self._compare()
            self.nbytes = sum(entry.size for entry in self.plan.send)
            self._send(self.plan.send)
            if self.changing:
                again = [entry for entry in self.plan.send if entry.path in set(self.changing)]
                self.changing.clear()
                self._send(again)
            self.took_s = time.monotonic() - began
        except BaseException:
            if self._host.is_alive:
                self._host.ask(DiscardRequest())
            raise

    # ---- what is there

    def _compare(self) -> None:
        for entries in _slices(self._choice.entries, _COMPARED):
            request = StatRequest(folder=self._folder, paths=[entry.path for entry in entries])
            self.plan.add(entries, self._ask(request, StatReply).found, overwrite=self._overwrite)
        ask = deque(self.plan.ask)
        while ask:
            together: list[tuple[SyncEntry, FoundFile, str]] = []
            nbytes = 0
            while ask and nbytes < _HASHED_BYTES and len(together) < _COMPARED:
                entry, its = ask.popleft()
                nbytes += entry.size
                together.append((entry, its, self._digest(entry)))
            files = [FileDigest(entry.path, its_digest, entry.mtime_ns) for entry, _, its_digest in together]
            same = self._ask(CompareRequest(folder=self._folder, files=files), CompareReply, _HASH_S).same
            for (entry, its, _), is_same in zip(together, same, strict=True):
                self.plan.add_compared(entry, its, is_same=is_same, overwrite=self._overwrite)

    def _digest(self, entry: SyncEntry) -> str:
        try:
            for found in digest(str(self._choice.folder / entry.path)):
                self._check()
                if found:
                    return found
        except OSError:
            pass  # the file was removed; sending it will notice that
        return ""

    def _ask(self, request: Message, expected: type[_R], timeout_s: float = _REPLY_S) -> _R:
        reply = self._reply(self._host.ask(request), request, timeout_s)
        assert isinstance(reply, expected)
        return reply

    def _reply(self, asked: Future[Message], request: Message, timeout_s: float) -> Message:
        reply = self._host.reply(asked, request, timeout_s, self._check)
        if isinstance(reply, FileErrorReply):
            where = os.path.join(self._folder, reply.path)
            words = fix_of(reply.number, reply.error)
            raise HostError(f"{where} cannot be written on {self._host.label}: {words}")
        return reply

    # ---- what is sent

    def _send(self, entries: Sequence[SyncEntry]) -> None:
        data = bytearray()
        parts: list[FilePart] = []
        for entry in entries:
            for part, piece in self._parts(entry):
                if parts and (len(data) + len(piece) > _PIECE_BYTES or len(parts) >= _MOST_PARTS):
                    self._write(parts, bytes(data))
                    data, parts = bytearray(), []
                parts.append(part)
                data += piece
        if parts:
            self._write(parts, bytes(data))
        while self._under_way:
            self._take_reply()

    def _write(self, parts: Sequence[FilePart], data: bytes) -> None:
        while len(self._under_way) >= self._window:
            self._take_reply()
        self._check()
        began = time.monotonic()
        request = WriteRequest(folder=self._folder, parts=list(parts), data=data)
        self._under_way.append((began, self._host.ask(request), replace(request, parts=[], data=b"")))
        self.sent_bytes += len(data)

    def _take_reply(self) -> None:
        sent_s, asked, request = self._under_way.popleft()
        self._reply(asked, request, _REPLY_S)
        is_quick = time.monotonic() - sent_s < _QUICK_S
        self._window = min(self._window + 1, _MOST_PIECES) if is_quick else max(self._window // 2, 1)

    def _parts(self, entry: SyncEntry) -> Iterator[tuple[FilePart, bytes]]:
        """Yield a file in parts of at most a piece. A file that changes during this is discarded and noted in
        `changing`.
        """
        if entry.link:
            yield FilePart(entry.path, link=entry.link), b""
            self.sent.append(entry.path)
            return
        try:
            file = open(self._choice.folder / entry.path, "rb", buffering=0)  # noqa: SIM115 - closed below
        except OSError:
            self.changing.append(entry.path)
            return
        is_first = True
        with file:
            before = os.fstat(file.fileno())
            end = before.st_mode & 0o777, before.st_mtime_ns  # only the permission bits, without setuid and setgid
            left = before.st_size
            while is_first or left > 0:
                piece = file.read(min(left, _PIECE_BYTES)) or b""
                left -= len(piece)
                now = os.fstat(file.fileno())
                if (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns) or (left and not piece):
                    self.changing.append(entry.path)
                    yield FilePart(entry.path, discard=True), b""
                    return
                yield FilePart(entry.path, len(piece), is_first, None if left else end), piece
                is_first = False
        self.sent.append(entry.path)


def fix_of(number: int, words: str) -> str:
    """Return the error of a file that cannot be written, with a fix.

    Args:
        number: of the error.
        words: message of the operating system.
    """
    return f"{words}; {_FIXES[number]}" if number in _FIXES else words


def _slices(entries: Sequence[SyncEntry], size: int) -> Iterator[list[SyncEntry]]:
    rest = iter(entries)
    while taken := list(islice(rest, size)):
        yield taken
