"""What a user can attach to on this machine: a file each, which nobody else can read, in a folder of the user's.

A kept session is one kind of it. Whatever else listens at a socket, such as a job of torchrun's, is another: it writes
an `Entry` of its own kind, and is found by its name.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import sys
import tempfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from ddp_notebook.errors import UsageError
from ddp_notebook.launch import processes
from ddp_notebook.version import __version__

SESSION = "session"  # a kind
SPOOL = "ddp_notebook-kept-"  # how folders begin that go with an entry
_LONGEST_PATH = 80  # a socket's path may have 107 bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One that can be attached to.

    Args:
        kind: `SESSION`, or another.
        name: by which it is attached to.
        socket: where it listens.
        key: what is to be said there first. Secret.
        pid, started: its process, see `launch.processes`.
        began_s: wall time at which it began.
        folder: that goes with it; "": none.
        about: what it is, in a few words.
        version, environment: of this package, and the one of Python that it runs in.
    """

    kind: str
    name: str
    socket: str
    key: str
    pid: int
    started: float
    began_s: float
    folder: str = ""
    about: str = ""
    version: str = __version__
    environment: str = sys.prefix

    @property
    def is_alive(self) -> bool:
        """Whether its process runs."""
        return processes.is_running((self.pid, self.started))


def folder() -> Path:
    """Where the files are. It is made, for its user only (mode 700).

    Raises:
        UsageError: there is such a folder already, and others may use it.
    """
    user = os.getuid()
    of_system = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{user}"
    base = Path(of_system)
    if base.is_dir() and base.stat().st_uid == user and len(of_system) < _LONGEST_PATH:
        path = base / "ddp_notebook"
    else:
        path = Path("/tmp") / f"ddp_notebook_{user}"
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    about = path.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != user or about.st_mode & 0o077:
        raise UsageError(
            f"{path} is to hold keys of sessions, but is not a folder of yours alone (mode {about.st_mode & 0o777:o}, "
            f"user {about.st_uid}); remove it, or name another folder in XDG_RUNTIME_DIR"
        )
    return path


def write(entry: Entry) -> bool:
    """Enter it, in a file of mode 600. Whether its name was free."""
    path = _path(entry.name)
    temporary = tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".", delete=False)  # noqa: SIM115  # mode 600
    with temporary:
        json.dump(asdict(entry), temporary)
    try:
        os.link(temporary.name, path)  # whole, or not at all
    except FileExistsError:
        return False
    finally:
        os.unlink(temporary.name)
    return True


def read(name: str) -> Entry | None:
    """The entry of this name. None: there is none that lives.

    Raises:
        UsageError: its file is another user's, or not this version's.
    """
    path = _path(name)
    try:
        about = path.lstat()
        if about.st_uid != os.getuid() or about.st_mode & 0o077:
            raise UsageError(
                f"{path} is not a file of yours alone; whoever can write it could run code here: remove it"
            )
        known = {one.name for one in fields(Entry)}
        entry = Entry(**{key: value for key, value in json.loads(path.read_text()).items() if key in known})
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise UsageError(f"{path} cannot be read by version {__version__}: {error}; remove it") from error
    if entry.is_alive:
        return entry
    remove(entry)
    return None


def everything() -> list[Entry]:
    """All that live, by name. What cannot be read is left out."""
    found = []
    for path in sorted(folder().glob("*.json"), key=lambda path: (len(path.name), path.name)):
        with contextlib.suppress(UsageError):
            if (entry := read(path.stem)) is not None:
                found.append(entry)
    return found


def find(name: str) -> Entry:
    """The entry of this name; "": the only one.

    Raises:
        UsageError: there is none, or several and none was named; or it is of another version or environment.
    """
    entry = read(name) if name else None
    there = everything()
    if entry is None and not name and len(there) == 1:
        [entry] = there
    if entry is None:
        names = ", ".join(one.name for one in there)
        if name:
            others = f"; there is {names}" if names else "; nothing is kept on this machine"
            raise UsageError(f"there is no {name!r} to attach to: it has ended, or never was{others}")
        raise UsageError(
            f"there are several: name one of {names}"
            if names
            else "nothing is kept on this machine: %ddp_start 4 --keep starts ranks that outlive their notebook"
        )
    if entry.version != __version__:
        raise UsageError(
            f"{entry.name} runs ddp_notebook {entry.version}, and this is {__version__}: attach from a kernel of that "
            f"version, or end it with: python -m ddp_notebook stop {entry.name}"
        )
    if entry.environment != sys.prefix:
        raise UsageError(
            f"{entry.name} runs in the environment {entry.environment}, and this kernel in {sys.prefix}: choose a "
            f"kernel of that one, or end it with: python -m ddp_notebook stop {entry.name}"
        )
    return entry


def remove(entry: Entry) -> None:
    """It has ended: nothing of it stays."""
    for path in (_path(entry.name), Path(entry.socket)):
        path.unlink(missing_ok=True)
    if Path(entry.folder).name.startswith(SPOOL):
        shutil.rmtree(entry.folder, ignore_errors=True)


def _path(name: str) -> Path:
    if not name or not all(letter.isalnum() or letter in "-_" for letter in name):
        raise UsageError(f"{name!r} is no name of a session; python -m ddp_notebook list shows those that there are")
    return folder() / f"{name}.json"
