"""A small file for each process of this user's that can be attached to: made by it, read by notebooks and shells.

    $XDG_RUNTIME_DIR/ddp_notebook/session-4711.json     0600, in a folder of mode 0700
                                  session-4711.sock     its door, see `doors`
                                  torchrun-4712.json    one for each rank of a job

An entry belongs to one process and goes with it. Who reads them removes those of processes that have ended, which
SIGKILL gives no time to do it. Where the user has no runtime directory, as in a container, the folder is below /tmp.
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

FORMAT = 1  # counts incompatible changes of these files
VARIABLE = "XDG_RUNTIME_DIR"
SPOOL = "ddp_notebook-kept-"  # how folders begin that go with an entry
_ELSEWHERE = "/tmp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One process that can be attached to."""

    kind: str  # see `finding`
    name: str  # that users know it by; ranks of one job share it
    who: Identity  # the process that it goes with
    began_s: float  # wall time
    version: str  # of the package there
    environment: str  # of Python there
    folder: str = ""  # goes with it; "": none
    about: dict[str, Any] = field(default_factory=dict, repr=False)  # what the kind has to say; it may hold keys
    path: Path

    @property
    def pid(self) -> int:
        return self.who[0]

    @property
    def door(self) -> Path:
        """Where its process may listen."""
        return self.path.with_suffix(".sock")

    def remove(self) -> None:
        """It is over: nothing of it stays. Doing it twice is no error."""
        for path in (self.door, self.path):
            path.unlink(missing_ok=True)
        if os.path.basename(self.folder).startswith(SPOOL):
            shutil.rmtree(self.folder, ignore_errors=True)


def door(kind: str) -> Path:
    """Where this process is to listen before it is entered, so that who finds the entry can come in.

    Raises:
        UsageError: the folder of entries is another user's, or open to others.
    """
    return folder() / f"{kind}-{os.getpid()}.sock"


def enter(kind: str, name: str, about: Mapping[str, Any], *, folder_with_it: str = "") -> Entry:
    """Enter this process.

    Args:
        kind: of the thing; one process has one entry of each.
        name: see `Entry`.
        about: what is to be told of it, as JSON. It may hold keys: nobody else can read it.
        folder_with_it: a folder that is removed with it, whose name begins with `SPOOL`.

    Raises:
        UsageError: the folder of entries is another user's, or open to others.
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
    """Return whether the entry of this process and its socket exist, in the folder where readers look now."""
    return entry.path.parent == folder() and entry.path.exists() and entry.door.exists()


def enter_again(entry: Entry) -> Entry:
    """Write the entry of this process again, where a cleaner has removed it or the runtime directory is another one.

    Raises:
        UsageError: the folder of entries is another user's, or open to others.
        OSError: the file cannot be written.
    """
    entry = replace(entry, path=door(entry.kind).with_suffix(".json"))
    _write(entry)
    return entry


def enter_next(kind: str, stem: str, about: Mapping[str, Any], *, folder_with_it: str = "") -> Entry:
    """Enter this process by the first of the names `STEM-1`, `STEM-2` ... that nobody has. Else as `enter`."""
    lock = os.open(folder(), os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        taken = {one.name for one in entries()}
        name = next(name for number in itertools.count(1) if (name := f"{stem}-{number}") not in taken)
        return enter(kind, name, about, folder_with_it=folder_with_it)
    finally:
        os.close(lock)


def entries(kind: str = "") -> list[Entry]:
    """What is there, in the order in which it was started; what is over is removed.

    Args:
        kind: "": all.

    Raises:
        UsageError: the folder is another user's, or open to others.
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
    """What lies there and cannot be used, in a sentence each: files of another version, or of another user."""
    return [why for file in sorted(folder().glob("*-*.json")) if (why := _read(file)[1])]


def stamp() -> int:
    """Differs from before where an entry was made, changed or removed since; for who looks again and again."""
    return folder().stat().st_mtime_ns


def folder() -> Path:
    """Where the files are. It is made, for its user only.

    Raises:
        UsageError: it is another user's, or open to others.
        OSError: it cannot be made.
    """
    user = os.getuid()
    base = Path(os.environ.get(VARIABLE) or f"/run/user/{user}")
    has_own = base.is_dir() and base.stat().st_uid == user
    path = base / "ddp_notebook" if has_own else Path(_ELSEWHERE) / f"ddp_notebook_{user}"
    with contextlib.suppress(FileExistsError):
        modes.make_folder(path)
    about = path.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != user or about.st_mode & 0o077:
        raise UsageError(
            f"{path} is to hold keys, but is not a folder of yours alone (mode {stat.S_IMODE(about.st_mode):o}, user "
            f"{about.st_uid}); close it (chmod 700) or remove it, or name another folder in {VARIABLE}, there and here"
        )
    return path


def _write(entry: Entry) -> None:
    """Readers see all of it or nothing."""
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
    """An entry of this machine, or None and why there is none; no reason where it is simply not ours to judge."""
    try:
        if (facts := file.lstat()).st_uid != os.getuid() or facts.st_mode & 0o077:
            return None, f"{file} is not a file of yours alone; whoever can write it could run code here: remove it"
        given = json.loads(file.read_text())
        if given["format"] != FORMAT:
            return None, (
                f"{file} is of ddp_notebook {given.get('version', '?')}, whose files this version ({__version__}) does "
                "not read: attach with that version, or end it there"
            )
        if given["machine"] != _machine():  # of another container, or before the last boot
            return None, ""
        pid, started = given["who"]
        entry = Entry(
            who=(int(pid), float(started)),
            path=file,
            **{key: given[key] for key in ("kind", "name", "began_s", "version", "environment", "folder", "about")},
        )
    except FileNotFoundError:  # it has just gone
        return None, ""
    except (KeyError, TypeError, ValueError, OSError) as error:
        return None, f"{file} cannot be read by version {__version__} ({type(error).__name__}: {error}): remove it"
    return entry, ""


@functools.cache
def _machine() -> str:
    """Process ids mean the same within this: containers may share a folder, and count processes for themselves."""
    with contextlib.suppress(OSError):
        return f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"
    return boot_id()
