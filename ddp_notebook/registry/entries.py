"""A small file for each thing of this user's that can be attached to: made by who runs it, read by notebooks.

    $XDG_RUNTIME_DIR/ddp_notebook/torchrun-4711.json    0600, in a folder of mode 0700
                                  torchrun-4711.sock    its door, see `doors`

An entry belongs to one process and goes with it. Who reads them removes those of processes that have ended, which
SIGKILL gives no time to do it. Where `XDG_RUNTIME_DIR` is not set, as in a container, the folder is below the one for
temporary files; notebooks look at both, since a shell and a server of notebooks may differ in that.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp_notebook.records.clocks import boot_id
from ddp_notebook.registry.identities import Identity, identity, is_running
from ddp_notebook.version import __version__

FORMAT = 1  # counts incompatible changes of these files
VARIABLE = "XDG_RUNTIME_DIR"


class RegistryError(OSError):
    """The folder, or a file in it, is not this user's alone. Says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One thing that can be attached to."""

    kind: str  # "torchrun": a rank of a job of torchrun's
    name: str  # that users know it by; ranks of one job share it
    who: Identity  # the process that it goes with
    version: str  # of the package there
    about: dict[str, Any] = field(default_factory=dict)  # what the kind has to say
    path: Path

    @property
    def pid(self) -> int:
        return self.who[0]

    @property
    def door(self) -> Path:
        """Where its process may listen."""
        return self.path.with_suffix(".sock")

    def remove(self) -> None:
        """It is over. Doing it twice is no error."""
        for path in (self.door, self.path):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()


def enter(kind: str, name: str, about: Mapping[str, Any]) -> Entry:
    """Enter this process.

    Args:
        kind: of the thing; one process has one entry of each.
        name: see `Entry`.
        about: what is to be told of it, as JSON. It may hold keys: nobody else can read it.

    Raises:
        RegistryError: the folder is another user's, or open to others.
        OSError: the file cannot be written.

    Example:
        >>> entry = enter("example", "mine", {"rank": 3})
        >>> [(one.name, one.about["rank"]) for one in entries("example")]
        [('mine', 3)]
        >>> entry.remove()
    """
    return write(
        Entry(
            kind=kind,
            name=name,
            who=identity(os.getpid()),
            version=__version__,
            about=dict(about),
            path=folder() / f"{kind}-{os.getpid()}.json",
        )
    )


def write(entry: Entry) -> Entry:
    """Write an entry, or in place of what it said before. Readers see the one or the other, never a half."""
    text = json.dumps(
        {
            "format": FORMAT,
            "machine": _machine(),
            "kind": entry.kind,
            "name": entry.name,
            "pid": entry.who[0],
            "started": entry.who[1],
            "version": entry.version,
            "about": entry.about,
        }
    )
    fd, temporary = tempfile.mkstemp(prefix=".", dir=entry.path.parent)  # of mode 0600
    try:
        with os.fdopen(fd, "w") as file:
            file.write(text)
        os.replace(temporary, entry.path)
    except BaseException:
        os.unlink(temporary)
        raise
    return entry


def entries(kind: str = "") -> list[Entry]:
    """What is there, in the order in which it was started; what is over is removed.

    Args:
        kind: "": all.

    Raises:
        RegistryError: a folder is another user's, or open to others.
    """
    found = [entry for path in _folders() for entry in _of_folder(path, kind)]
    return sorted(found, key=lambda entry: entry.who[1])


def strangers(kind: str) -> list[str]:
    """What lies there and cannot be used, in a sentence each: files of another version, or of another user."""
    return [why for path in _folders() for file in sorted(path.glob(f"{kind}-*.json")) if (why := _read(file)[1])]


def stamp() -> tuple[int, ...]:
    """Differs from before where an entry was made, changed or removed since; for who looks again and again."""
    found = []
    for path in _places():
        with contextlib.suppress(OSError):
            found.append(path.stat().st_mtime_ns)
    return tuple(found)


def folder() -> Path:
    """Where entries are made: only this user can look into it.

    Raises:
        RegistryError: the folder is another user's, or open to others.
        OSError: it cannot be made.
    """
    path = _places()[0]
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    _check(path)
    return path


def _places() -> list[Path]:
    """Where the folder may be, the one for this process first."""
    user, runtime = os.getuid(), os.environ.get(VARIABLE, "")
    bases = [Path(runtime)] if runtime and os.path.isdir(runtime) else []
    places = [base / "ddp_notebook" for base in (*bases, Path(f"/run/user/{user}")) if base in bases or base.is_dir()]
    places.append(Path(tempfile.gettempdir()) / f"ddp_notebook_{user}")
    if not bases:  # a runtime folder that nobody has told of may go when the user logs out
        places.insert(0, places.pop())
    return list(dict.fromkeys(places))


def _folders() -> Iterator[Path]:
    for path in _places():
        if path.is_symlink() or path.exists():
            _check(path)
            yield path


def _check(path: Path) -> None:
    """Below /tmp anybody may have made a folder of this name before."""
    facts = path.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
        raise RegistryError(
            f"{path} is no folder of user {os.getuid()} but of user {facts.st_uid}, so nothing is entered or looked "
            f"for there; remove it, or set {VARIABLE} to a folder of your own, for the job and for the notebook"
        )
    if facts.st_mode & 0o077:
        raise RegistryError(
            f"{path} is open to others (mode {stat.S_IMODE(facts.st_mode):o}), so nothing is entered or looked for "
            f"there; close it: chmod 700 {path}"
        )


def _of_folder(path: Path, kind: str) -> Iterator[Entry]:
    for file in path.glob(f"{kind or '*'}-*.json"):
        entry, _ = _read(file)
        if entry is None:
            continue
        if is_running(entry.who):
            yield entry
        else:
            entry.remove()


def _read(file: Path) -> tuple[Entry | None, str]:
    """An entry of this machine, or None and why there is none; no reason where it is simply not ours to judge."""
    try:
        if (owner := file.lstat().st_uid) != os.getuid():
            return None, f"{file} is of user {owner}: remove it"
        given = json.loads(file.read_text())
        if given["format"] != FORMAT:
            return None, (
                f"{file} is of ddp_notebook {given.get('version', '?')}, whose files this version ({__version__}) does "
                "not read: attach with that version, or end it there"
            )
        if given["machine"] != _machine():  # of another container, or before the last boot
            return None, ""
        entry = Entry(
            kind=given["kind"],
            name=given["name"],
            who=(given["pid"], given["started"]),
            version=given["version"],
            about=given["about"],
            path=file,
        )
    except FileNotFoundError:  # it has just gone
        return None, ""
    except (KeyError, TypeError, ValueError, OSError) as error:
        return None, f"{file} cannot be read ({type(error).__name__}: {error}): remove it"
    return entry, ""


@functools.cache
def _machine() -> str:
    """Process ids mean the same within this: containers may share a folder, and count processes for themselves."""
    with contextlib.suppress(OSError):
        return f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"
    return boot_id()
