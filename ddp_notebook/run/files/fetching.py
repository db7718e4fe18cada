"""Fetch files of ranks over the sockets for bulk data, in pieces that fit into memory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, overload

from ddp_notebook.errors import CannotWriteError, DDPNotebookError, UsageError
from ddp_notebook.messages.encoding import Message
from ddp_notebook.messages.files import ListFiles, ReadFiles
from ddp_notebook.messages.ranks import Pulled
from ddp_notebook.records import units
from ddp_notebook.records.names import printable
from ddp_notebook.records.words import format_ranks, group_by_value, list_ranks, name_ranks
from ddp_notebook.run.cells.interrupt import uninterrupted
from ddp_notebook.run.files.landing import Landing
from ddp_notebook.run.groups.liveness import Liveness
from ddp_notebook.run.rank_requests import Questions
from ddp_notebook.run.rank_sets import RankSet
from ddp_notebook.run.values.transfers import Transfers

_SEGMENT_BYTES = 16 << 20  # bytes that a rank reads at a time
_MOST_PARTS = 500
_SHOWN = 5  # names shown in an error


class File(NamedTuple):
    """A file of a rank."""

    path: str  # path on the rank's host
    name: str  # name relative to the target folder
    size: int  # bytes
    mtime_ns: int
    mode: int  # permissions
    inode: int
    ends: str  # digest of its first and last bytes


class Fetched(Sequence[Path]):
    """The written paths. Its `repr` also names their ranks."""

    def __init__(self, paths: Sequence[Path], lines: Sequence[str]) -> None:
        self._paths = tuple(paths)
        self._lines = tuple(lines)

    @overload
    def __getitem__(self, index: int) -> Path: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Path, ...]: ...
    def __getitem__(self, index: int | slice) -> Path | tuple[Path, ...]:
        return self._paths[index]

    def __len__(self) -> int:
        return len(self._paths)

    def __repr__(self) -> str:
        return "\n".join(map(printable, self._lines))


class Fetching:
    """Fetches files, in the run queue of the cells.

    Args:
        turn: waits until these ranks are idle, and reserves them.
        questions: sends requests to the ranks.
        transfers: transfers large data.
        liveness: liveness checks of the ranks.
    """

    def __init__(
        self,
        turn: Callable[[list[int]], AbstractContextManager[None]],
        questions: Questions,
        transfers: Transfers,
        liveness: Liveness,
    ) -> None:
        self._turn = turn
        self._questions = questions
        self._transfers = transfers
        self._liveness = liveness

    def fetch(self, path: str, ranks: RankSet, to: str, *, overwrite: bool, report: Callable[[str], None]) -> Fetched:
        """Fetch files, see `SessionFiles.fetch`."""
        chosen = self._liveness.parse(ranks)
        folder = Path(to).expanduser()
        if "\0" in str(folder):
            raise UsageError(f"to must be a folder name without null characters, got {to!r}")
        with self._turn(chosen):
            groups = self._find(path, chosen)
            to_write: dict[Path, tuple[int, File]] = {}
            lines = []
            for those, files in groups.items():
                where = folder if len(groups) == 1 else folder / f"rank{format_ranks(those)}"
                _check_links(files, where)
                missing = _missing(files, where, overwrite)
                to_write |= {where / file.name: (those[0], file) for file in missing}
                lines.append(_line(those, files, missing, where))
            _check_space(folder, [file.size for _, file in to_write.values()])
            with Landing(overwrite=overwrite) as landing:
                self._fetch(to_write, landing, report)
            return Fetched(landing.written, lines)

    def _find(self, path: str, ranks: list[int]) -> dict[tuple[int, ...], list[File]]:
        """Return the files for each set of ranks that share the same ones."""
        found = {}
        answers = self._ask({rank: lambda n: ListFiles(request=n, path=path) for rank in ranks}, path)
        for rank, data in answers.items():
            found[rank] = _listed(rank, data)
        return {tuple(those): list(files) for files, those in group_by_value(found).items()}

    def _fetch(self, files: Mapping[Path, tuple[int, File]], landing: Landing, report: Callable[[str], None]) -> None:
        whole, done = sum(file.size for _, file in files.values()), 0
        for rank, parts in _segments(files):
            wanted = [[file.path, offset, nbytes, file.size, file.mtime_ns] for _, file, offset, nbytes in parts]
            data = self._ask({rank: _reading(wanted, self._transfers.memory_name)})[rank]
            rest = memoryview(data)
            for target, file, offset, nbytes in parts:
                landing.write(target, rest[:nbytes])
                rest = rest[nbytes:]
                if offset + nbytes == file.size:
                    landing.end(target, file.mode, file.mtime_ns)
            done += len(data)
            report(f"\r{units.size(done)} of {units.size(whole)}")

    def _ask(
        self, messages: Mapping[int, Callable[[int], Message]], path: str = ""
    ) -> dict[int, bytearray | memoryview]:
        """Send requests to ranks, and fetch the data of their answers."""
        asked: dict[int, Future[Pulled]] = {}  # answers whose data was not fetched yet
        try:
            with uninterrupted():
                for rank, make in messages.items():
                    asked[rank] = self._questions.ask(rank, make)
            answers = {rank: self._questions.wait_for(rank, future) for rank, future in asked.items()}
            _raise_errors(answers, path)
            found = {}
            for rank, answer in answers.items():
                found[rank] = self._transfers.fetch(rank, answer)
                del asked[rank]
            return found
        finally:
            for rank, future in asked.items():  # immediately, or when the answer arrives
                future.add_done_callback(partial(self._transfers.drop_answer, rank))


def _listed(rank: int, data: bytes | bytearray | memoryview) -> tuple[File, ...]:
    """Decode the files that a rank has listed.

    Raises:
        DDPNotebookError: a path leads out of the target folder. A compromised rank may send such a path.
    """
    files = tuple(File(*fields) for fields in json.loads(bytes(data)))
    for file in files:
        if Path(file.name).is_absolute() or ".." in Path(file.name).parts:
            raise DDPNotebookError(f"rank {rank} sent the path {file.name!r} outside the folder; nothing was fetched")
    return files


def _reading(parts: list[list[Any]], memory: str) -> Callable[[int], ReadFiles]:
    return lambda number: ReadFiles(request=number, parts=parts, memory=memory)


def _segments(
    files: Mapping[Path, tuple[int, File]],
) -> Iterator[tuple[int, list[tuple[Path, File, int, int]]]]:
    """Yield requests: a rank, and parts of its files, each with target, offset and number of bytes."""
    parts: list[tuple[Path, File, int, int]] = []
    nbytes, of = 0, -1
    for target, (rank, file) in files.items():
        offset = 0
        while offset < file.size or offset == 0:
            if parts and (rank != of or nbytes >= _SEGMENT_BYTES or len(parts) >= _MOST_PARTS):
                yield of, parts
                parts, nbytes = [], 0
            of = rank
            part = min(file.size - offset, _SEGMENT_BYTES - nbytes)
            parts.append((target, file, offset, part))
            nbytes += part
            offset += part
            if file.size == 0:
                break
    if parts:
        yield of, parts


def _check_links(files: Sequence[File], folder: Path) -> None:
    """Raise an error if a link in the target folder leads out of it.

    Raises:
        DDPNotebookError: there is such a link.
    """
    whole = folder.resolve()
    for inner in sorted({(folder / file.name).parent for file in files}):
        if not (leads_to := inner.resolve()).is_relative_to(whole):
            raise DDPNotebookError(
                f"{printable(str(inner))} leads out of the target folder, to {printable(str(leads_to))}. Nothing was "
                "fetched: choose another folder with --to (to=)"
            )


def _check_space(folder: Path, sizes: Sequence[int]) -> None:
    """Check that files fit on the notebook's machine before the first one is sent.

    Files that replace others need space too, since each old file is complete until its new one is.

    Raises:
        CannotWriteError: the files are larger than the free space.
    """
    there = next((one for one in (folder.absolute(), *folder.absolute().parents) if one.exists()), Path(os.sep))
    its = os.statvfs(there)
    free = its.f_bavail * its.f_frsize
    if sum(sizes) > free:
        count = f"{len(sizes):,} files" if len(sizes) > 1 else "the file"
        raise CannotWriteError(
            f"{count} of {units.size(sum(sizes))} cannot be written to {folder.absolute()} here: {units.size(free)} of "
            f"{units.size(its.f_blocks * its.f_frsize)} are free. Nothing was fetched: name fewer files, or another "
            "folder with --to (to=)"
        )


def _missing(files: Sequence[File], folder: Path, overwrite: bool) -> list[File]:
    """Return the files that do not exist locally yet.

    Raises:
        DDPNotebookError: other files have these names.
    """
    missing, others = [], []
    for file in files:
        target = folder / file.name
        try:
            its = target.stat()
        except OSError:
            missing.append(file)
            continue
        if target.is_file() and (its.st_size, its.st_mtime_ns) == (file.size, file.mtime_ns):
            continue
        missing.append(file)
        if target.is_dir() or not overwrite:
            others.append(str(target))
    if others:
        more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
        raise DDPNotebookError(
            f"existing files: {', '.join(others[:_SHOWN])}{more}. Nothing was fetched: choose another folder with --to "
            "(to=), or replace the files with --overwrite (overwrite=True)"
        )
    return missing


def _line(ranks: Sequence[int], files: Sequence[File], missing: Sequence[File], folder: Path) -> str:
    of = (
        f"{list_ranks(ranks)}, who share {'it' if len(files) == 1 else 'them'},"
        if len(ranks) > 1
        else name_ranks(ranks)
    )
    if not missing:
        return f"{folder} has all {units.files(len(files), sum(f.size for f in files))} of {of} already"
    line = f"{units.files(len(missing), sum(file.size for file in missing))} of {of} in {folder}"
    there = len(files) - len(missing)
    return line + (f"; {there:,} were there already" if there else "")


def _raise_errors(answers: Mapping[int, Pulled], path: str) -> None:
    errors = group_by_value({rank: answer.error for rank, answer in answers.items() if answer.error})
    if not errors:
        return
    said = "; ".join(f"{name_ranks(ranks)}: {error}" for error, ranks in errors.items())
    have = [rank for rank, answer in answers.items() if not answer.error]
    hint = f"; nothing was fetched: name the ranks that have it, --ranks {format_ranks(have)}" if path and have else ""
    raise DDPNotebookError(said + hint)
