"""List and read a rank's files for the notebook."""

from __future__ import annotations

import glob
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from ddp_notebook.messages.encoding import Message
from ddp_notebook.messages.files import ListFiles, ReadFiles
from ddp_notebook.messages.ranks import Pulled
from ddp_notebook.rank.cell.exceptions import with_type
from ddp_notebook.rank.hooks import Feature
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import hashlib, json, os, stat


class CannotFetchError(Exception):
    """Files that cannot be fetched. The message names them and the reason."""


Entry = tuple[str, str, int, int, int, int, str]
_END_BYTES = 4096
_MOST_FILES = 20_000


def find(pattern: str) -> list[Entry]:
    """Return the files that a path or pattern matches, including files in matching folders.

    Args:
        pattern: a file, a folder or a `glob` pattern, relative to the working directory.

    Returns:
        For each file: path, name relative to the folder where the pattern starts, size in bytes, modification time in
        ns, permissions, inode, and a digest of its first and last bytes.

    Raises:
        CannotFetchError: no file matches, more than 20,000 files match, or the home or root folder is named.
    """
    whole = os.path.expanduser(pattern)
    is_one = os.path.lexists(whole)
    matches = [whole] if is_one else sorted(islice(glob.iglob(whole, recursive=True), _MOST_FILES + 1))
    if not matches:
        raise CannotFetchError(f"no file matches {pattern!r} in the working directory {os.getcwd()}")
    if is_one:
        _check_folder(pattern, whole)
    base = os.path.dirname(os.path.abspath(whole)) if is_one else _fixed_part(whole, matches)
    found = dict.fromkeys(islice((path for one in matches for path in _files(os.path.abspath(one))), _MOST_FILES + 1))
    if len(found) > _MOST_FILES:
        raise CannotFetchError(
            f"{pattern!r} has more than {_MOST_FILES:,} files ({base}): name a part of it, or pack the files into an "
            "archive and fetch that"
        )
    entries = [entry for path in found if (entry := _entry(path, base)) is not None]
    if not entries:
        raise CannotFetchError(f"{pattern!r} contains no files ({os.path.abspath(matches[0])})")
    return entries


def _check_folder(pattern: str, whole: str) -> None:
    """Refuse the home folder, the root folder and the folders between them: `..` may lead to one by mistake."""
    path, home = os.path.realpath(whole), os.path.realpath(os.path.expanduser("~"))
    if home == path or home.startswith(path.rstrip(os.sep) + os.sep):
        raise CannotFetchError(
            f"the files to fetch must not be the home folder or a folder above it, got {pattern!r} ({path}); name a "
            "folder inside it"
        )


def _fixed_part(pattern: str, matches: Sequence[str]) -> str:
    """Return the folder above the first part of the path that has a wildcard, or above a `..` after the wildcard."""
    parts = os.path.abspath(pattern).split(os.sep)
    first = next(i for i, part in enumerate([*parts, "*"]) if glob.has_magic(part))
    base = os.sep.join(parts[:first]) or os.sep
    return os.path.commonpath([base, *(os.path.dirname(os.path.abspath(match)) for match in matches)])


def _files(path: str) -> Iterator[str]:
    if not os.path.isdir(path):
        yield path
        return
    for place, _, names in os.walk(path):
        yield from (os.path.join(place, name) for name in sorted(names))


def _entry(path: str, base: str) -> Entry | None:
    """Return the entry of a file; None for a broken link, and if it is not a regular file."""
    try:
        its = os.stat(path)
    except OSError:
        return None
    if not stat.S_ISREG(its.st_mode):
        return None
    name = os.path.relpath(path, base)
    mode = stat.S_IMODE(its.st_mode)
    return os.path.realpath(path), name, its.st_size, its.st_mtime_ns, mode, its.st_ino, _ends(path, its.st_size)


def _ends(path: str, size: int) -> str:
    """Return a digest of the first and last bytes of a file; "" if it cannot be read.

    Two hosts may each write a file with the same path, timestamp and inode.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            ends = [os.pread(file.fileno(), _END_BYTES, at) for at in (0, max(0, size - _END_BYTES))]
    except OSError:  # `read` reports the error
        return ""
    return hashlib.blake2b(b"".join(ends), digest_size=8).hexdigest()


def read(parts: Sequence[Sequence[Any]]) -> bytes:
    """Return parts of files, joined in the given order.

    Args:
        parts: for each part: path, offset, number of bytes, and the size and modification time of the file.

    Raises:
        CannotFetchError: a file cannot be read, or has changed.
    """
    data = []
    for path, offset, nbytes, size, mtime_ns in parts:
        try:
            with open(path, "rb", buffering=0) as file:
                data.append(os.pread(file.fileno(), nbytes, offset))
                its = os.fstat(file.fileno())
        except OSError as error:
            raise CannotFetchError(f"{path} cannot be read: {error.strerror}") from error
        if (its.st_size, its.st_mtime_ns) != (size, mtime_ns) or len(data[-1]) != nbytes:
            raise CannotFetchError(f"{path} is being written: it changed while it was read; fetch it again later")
    return b"".join(data)


class FileTransfer(Feature):
    """Rank side of `%ddp_fetch`."""

    def questions(self) -> Mapping[type[Message], Callable[[Any], Coroutine[Any, Any, None]]]:
        return {ListFiles: self._read, ReadFiles: self._read}

    async def _read(self, message: ListFiles | ReadFiles) -> None:
        try:
            data = json.dumps(find(message.path)).encode() if isinstance(message, ListFiles) else read(message.parts)
        except CannotFetchError as error:
            self.core.send(Pulled(request=message.request, error=str(error)))
        except Exception as error:  # such as a deleted working directory; the notebook waits for an answer
            self.core.send(Pulled(request=message.request, error=with_type(error)))
        else:
            memory = "" if isinstance(message, ListFiles) else message.memory
            self.core.answer(message.request, [data], "", memory)


FEATURE = FileTransfer
