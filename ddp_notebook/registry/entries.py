"""Registry entries: one file per process of this user to which a notebook can attach.

    $XDG_RUNTIME_DIR/ddp_notebook/session-4711.json     0600, in a folder of mode 0700
                                  session-4711.sock     its Unix socket, see `unix_sockets`
                                  torchrun-4712.json    one for each rank of a job

A process writes its own entry and removes it when it exits. Readers remove entries of killed processes. If the user has
no runtime directory, for example in a container, the folder is below /tmp.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import itertools
import json
import os
import shutil
import stat
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ddp_notebook.errors import UsageError
from ddp_notebook.records.clocks import boot_id
from ddp_notebook.registry import modes
from ddp_notebook.registry.identities import Identity, identity, is_running
from ddp_notebook.version import __version__

FORMAT = 1  # incremented at incompatible changes of these files
VARIABLE = "XDG_RUNTIME_DIR"
SPOOL = "ddp_notebook-kept-"  # prefix of folders that are removed with an entry
_ELSEWHERE = "/tmp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Registry entry of one process to which a notebook can attach."""

    kind: str  # `lookup.SESSION` or `lookup.TORCHRUN`
    name: str  # name for users; the ranks of one job share it
    who: Identity  # process of the entry
    began_s: float  # start, as wall time
    version: str  # version of this package in the process
    environment: str  # `sys.prefix` of the process
    folder: str = ""  # folder that is removed with the entry; "": none
    about: dict[str, Any] = field(default_factory=dict, repr=False)  # data of this kind of entry; it may contain keys
    path: Path

    @property
    def pid(self) -> int:
        return self.who[0]

    @property
    def door(self) -> Path:
        """Return the path of the Unix socket on which the process may listen."""
        return self.path.with_suffix(".sock")

    def remove(self) -> None:
        """Remove the entry, its socket and its folder. Has no effect if they are already removed."""
        for path in (self.door, self.path):
            path.unlink(missing_ok=True)
        if os.path.basename(self.folder).startswith(SPOOL):
            shutil.rmtree(self.folder, ignore_errors=True)


def door(kind: str) -> Path:
    """Return the path of the Unix socket for this process.

    The process must listen on it before it writes its entry, so that readers of the entry can connect.

    Raises:
        UsageError: the folder of entries belongs to another user, or other users can access it.
    """
    return folder() / f"{kind}-{os.getpid()}.sock"


def enter(kind: str, name: str, about: Mapping[str, Any], *, folder_with_it: str = "") -> Entry:
    """Write an entry for this process.

    Args:
        kind: kind of the entry. A process has at most one entry of each kind.
        name: name for users.
        about: data of the entry as JSON. It may contain keys, because other users cannot read it.
        folder_with_it: folder that is removed with the entry. Its name must start with `SPOOL`.

    Raises:
        UsageError: the folder of entries belongs to another user, or other users can access it.
        OSError: the file cannot be written.

    Example:
        >>> entry = enter("example", "mine", {"rank": 3})
        >>> [(one.name, one.about["rank"]) for one in entries("example")]
        [('mine', 3)]
        >>> entry.remove()
    """
    entry = Entry(
        kind=kind,
        name=name,
        who=identity(os.getpid()),
        began_s=time.time(),
        version=__version__,
        environment=sys.prefix,
        folder=folder_with_it,
        about=dict(about),
        path=door(kind).with_suffix(".json"),
    )
    _write(entry)
    return entry


def is_complete(entry: Entry) -> bool:
    """Return whether this process's entry and socket exist in the current folder of entries."""
    return entry.path.parent == folder() and entry.path.exists() and entry.door.exists()


def enter_again(entry: Entry) -> Entry:
    """Write this process's entry again, after a cleaner removed it or the runtime directory changed.

    Raises:
        UsageError: the folder of entries belongs to another user, or other users can access it.
        OSError: the file cannot be written.
    """
    entry = replace(entry, path=door(entry.kind).with_suffix(".json"))
    _write(entry)
    return entry


def enter_next(kind: str, stem: str, about: Mapping[str, Any], *, folder_with_it: str = "") -> Entry:
    """Write an entry with the first free name of `STEM-1`, `STEM-2`, ... Otherwise like `enter`."""
    lock = os.open(folder(), os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        taken = {one.name for one in entries()}
        name = next(name for number in itertools.count(1) if (name := f"{stem}-{number}") not in taken)
        return enter(kind, name, about, folder_with_it=folder_with_it)
    finally:
        os.close(lock)


def entries(kind: str = "") -> list[Entry]:
    """Return the entries of running processes in the order of their start. Remove the entries of ended processes.

    Args:
        kind: kind of entries; "" for all.

    Raises:
        UsageError: the folder of entries belongs to another user, or other users can access it.
    """
    found = []
    for file in folder().glob(f"{kind or '*'}-*.json"):
        entry, _ = _read(file)
        if entry is None:
            continue
        if is_running(entry.who):
            found.append(entry)
        else:
            entry.remove()
    return sorted(found, key=lambda entry: entry.who[::-1])


def strangers() -> list[str]:
    """Return a sentence for each unusable entry: of another version, or writable by other users."""
    return [why for file in sorted(folder().glob("*-*.json")) if (why := _read(file)[1])]


def stamp() -> int:
    """Return a number that changes when an entry is created, changed or removed, for periodic readers."""
    return folder().stat().st_mtime_ns


def folder() -> Path:
    """Return the folder of entries. It is created with access for this user only.

    Raises:
        UsageError: the folder cannot be created, belongs to another user, or other users can access it.
    """
    user = os.getuid()
    base = Path(os.environ.get(VARIABLE) or f"/run/user/{user}")
    # A read-only runtime directory is one that this user does not have.
    has_own = base.is_dir() and base.stat().st_uid == user and os.access(base, os.W_OK)
    path = base / "ddp_notebook" if has_own else Path(_ELSEWHERE) / f"ddp_notebook_{user}"
    try:
        modes.make_folder(path)
    except FileExistsError:
        pass
    except OSError as error:
        raise UsageError(
            f"{path}, where sessions are registered, cannot be created: {error.strerror}; set {VARIABLE} to a folder "
            "that you can write to in every process"
        ) from error
    about = path.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != user or about.st_mode & 0o077:
        raise UsageError(
            f"{path} must be a folder that only you can use, got mode {stat.S_IMODE(about.st_mode):o} and user "
            f"{about.st_uid}; run chmod 700, remove it, or set {VARIABLE} to another folder in every process"
        )
    return path


def _write(entry: Entry) -> None:
    """Write an entry atomically."""
    text = json.dumps(
        {
            "format": FORMAT,
            "machine": _machine(),
            "kind": entry.kind,
            "name": entry.name,
            "who": entry.who,
            "began_s": entry.began_s,
            "version": entry.version,
            "environment": entry.environment,
            "folder": entry.folder,
            "about": entry.about,
        }
    )
    fd, temporary = modes.new_file(".", "", entry.path.parent)
    try:
        with os.fdopen(fd, "w") as file:
            file.write(text)
        os.replace(temporary, entry.path)
    except BaseException:
        os.unlink(temporary)
        raise


def _read(file: Path) -> tuple[Entry | None, str]:
    """Read an entry of this machine.

    Returns:
        The entry and "", or None and the reason. The reason is "" for an entry of another machine or a removed file.
    """
    try:
        if (facts := file.lstat()).st_uid != os.getuid() or facts.st_mode & 0o077:
            return None, f"{file} must be owned by you and closed to other users, who could run code with it: remove it"
        given = json.loads(file.read_text())
        if given["format"] != FORMAT:
            return None, (
                f"{file} was written by ddp_notebook {given.get('version', '?')}, and this version ({__version__}) "
                "cannot read it: attach with that version, or end it there"
            )
        if given["machine"] != _machine():  # in another container, or from before the last boot
            return None, ""
        pid, started = given["who"]
        entry = Entry(
            who=(int(pid), float(started)),
            path=file,
            **{key: given[key] for key in ("kind", "name", "began_s", "version", "environment", "folder", "about")},
        )
    except FileNotFoundError:  # just removed
        return None, ""
    except (KeyError, TypeError, ValueError, OSError) as error:
        return None, f"{file} cannot be read by version {__version__} ({type(error).__name__}: {error}): remove it"
    return entry, ""


@functools.cache
def _machine() -> str:
    """Return an id of the scope in which process ids are valid.

    Containers may share a folder but have their own process ids.
    """
    with contextlib.suppress(OSError):
        return f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"
    return boot_id()
