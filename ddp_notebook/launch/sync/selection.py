"""Select the files of a folder to send: no keys, no files outside the folder, and no accidental large upload."""

from __future__ import annotations

import fnmatch
import os
import stat
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ddp_notebook.errors import UsageError
from ddp_notebook.records import units
from ddp_notebook.records.marker import MARK
from ddp_notebook.registry import modes, private

NEVER = {".git", ".hg", ".svn", "__pycache__", ".ipynb_checkpoints"}  # folders that are useless on other machines
_ENVIRONMENT = "pyvenv.cfg"  # marks a virtual environment, with paths and binaries of its machine
_OF_WHOLE_TREE = ("ls-files", "-z", "--cached", "--others", "--exclude-standard")


def names(folder: Path) -> list[str]:
    """Return the files and links below a folder, sorted, with "/" between the parts of a name.

    Inside a git work tree, these are the tracked files and those that are not ignored. Elsewhere an empty repository is
    used, so that `.gitignore` files in the folder are respected.

    Raises:
        UsageError: there is a `.gitignore`, and git is not installed or refuses to read the folder.
    """
    found = sorted(set(_below(folder)))
    environments = [name.removesuffix(_ENVIRONMENT) for name in found if name.endswith(f"/{_ENVIRONMENT}")]
    return [name for name in found if not (name.startswith(tuple(environments)) or NEVER & set(name.split("/")[:-1]))]


def _below(folder: Path) -> Iterator[str]:
    """Yield the files that git lists, with those of nested repositories."""
    for name in _listed(folder):
        path = folder / name
        if path.is_dir() and not path.is_symlink():  # git lists a nested repository without its files
            if (path / ".git").exists():  # else it is a submodule that was not checked out
                yield from (f"{name.rstrip('/')}/{one}" for one in _below(path))
        else:
            yield name


def _listed(folder: Path) -> list[str]:
    try:
        inside = _git(folder, "rev-parse", "--is-inside-work-tree")
    except FileNotFoundError:
        return list(_walked(folder))
    if "dubious ownership" in inside.stderr:
        raise UsageError(f"git refuses to read {folder}: {inside.stderr.strip()}")
    if inside.stdout.strip() == "true" and _git(folder, "check-ignore", "--quiet", ".").returncode != 0:
        return _names(_git(folder, *_OF_WHOLE_TREE), folder)
    with tempfile.TemporaryDirectory(prefix="ddp_notebook-", dir=private.temporary()) as directory:
        os.chmod(directory, modes.FOLDER)
        empty = f"--git-dir={directory}/.git"
        _git(folder, "init", "--quiet", directory)
        return _names(_git(folder, empty, f"--work-tree={folder}", *_OF_WHOLE_TREE), folder)


def _git(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    # they may belong to another repository
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return subprocess.run(
        ["git", "-c", "core.fsmonitor=false", "-C", str(folder), *words],
        env={**env, "LC_ALL": "C"},
        capture_output=True,
        text=True,
        errors="surrogateescape",
        stdin=subprocess.DEVNULL,
    )


def _names(listed: subprocess.CompletedProcess[str], folder: Path) -> list[str]:
    if listed.returncode != 0:
        raise UsageError(f"git cannot list the files of {folder}: {listed.stderr.strip()}")
    return listed.stdout.split("\0")[:-1]


def _walked(folder: Path) -> Iterator[str]:
    """Yield the files without git."""
    for place, folders, files in os.walk(folder):
        if ".gitignore" in files:
            raise UsageError(f"{place} has a .gitignore, which only git can apply; install git, or remove that file")
        for name in list(folders):
            if name in NEVER:
                folders.remove(name)
            elif os.path.islink(os.path.join(place, name)):
                files.append(name)
        yield from (os.path.relpath(os.path.join(place, name), folder) for name in files)


MOST_BYTES = 10**9
MOST_FILES = 20_000
_SHOWN = 4  # entries of a folder that is too large
_KEYS = (
    "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "*.pem", "*.key", "*.p12", "*.pfx", "*.ppk", "*.jks", "*.kdbx",
    "*.keystore", ".env", ".env.*", "*.env", "credentials", "credentials.*", ".netrc", "_netrc", ".pgpass", ".pypirc",
    ".npmrc", ".htpasswd", ".git-credentials", "kubeconfig*", "*.kubeconfig", "service_account*.json",
    "service-account*.json", "secrets.*", ".vault-token",
)  # fmt: skip
_NO_KEYS = ("*.pub", "*.py", ".env.example", ".env.sample", ".env.template")
_FOLDERS_OF_KEYS = {".ssh", ".aws", ".azure", ".gnupg", ".kube", "gcloud"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncEntry:
    """A file or link to send."""

    path: str  # relative to the folder
    size: int  # bytes
    mtime_ns: int
    mode: int  # permissions
    link: str = ""  # target of a link, within the folder


@dataclass(slots=True)
class SyncFilter:
    """Files of a folder to send, and those that are left out although git lists them."""

    folder: Path
    entries: list[SyncEntry] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    leading_out: list[str] = field(default_factory=list)  # links
    unreadable: list[str] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(entry.size for entry in self.entries)


def resolved(folder: str) -> Path:
    """Return the absolute path of a folder, without resolving links.

    Raises:
        UsageError: it does not exist, or is the home or root folder.
    """
    path = Path(os.path.abspath(os.path.expanduser(folder)))
    if not path.is_dir():
        raise UsageError(
            f"the folder to send must exist, got {folder!r} ({path}); name the one with your code, e.g. --sync ."
        )
    if path == Path.home() or path == Path(path.anchor):
        raise UsageError(
            f"the folder to send must not be the home or root folder, got {path}; name the folder with your code"
        )
    return path


def choose(folder: Path, *, also: Sequence[str] = (), is_large: bool = False) -> SyncFilter:
    """Choose the files of a folder.

    Args:
        folder: an absolute path.
        also: patterns of names or paths to send although they may contain keys.
        is_large: allow more than 1 GB or 20,000 files.

    Raises:
        UsageError: it is too large; the message names the largest entries.
    """
    choice = SyncFilter(folder)
    for name in names(folder):
        path = folder / name
        try:
            its = os.lstat(path)
        except OSError:
            continue  # listed by git, but deleted
        if path.name.startswith(MARK) or not (stat.S_ISREG(its.st_mode) or stat.S_ISLNK(its.st_mode)):
            continue
        if may_hold_keys(name) and not any(_matches(name, pattern) for pattern in also):
            choice.keys.append(name)
        elif stat.S_ISLNK(its.st_mode):
            link = _link_within(folder, path)
            if link:
                choice.entries.append(SyncEntry(path=name, size=0, mtime_ns=its.st_mtime_ns, mode=0, link=link))
            else:
                choice.leading_out.append(name)
        elif not os.access(path, os.R_OK):
            choice.unreadable.append(name)
        else:
            mode = stat.S_IMODE(its.st_mode)
            choice.entries.append(SyncEntry(path=name, size=its.st_size, mtime_ns=its.st_mtime_ns, mode=mode))
    if not is_large:
        _check_size(choice)
    return choice


def may_hold_keys(name: str) -> bool:
    """Return whether a file's name is usual for keys and passwords.

    Example:
        >>> [may_hold_keys(name) for name in ("deploy.pem", ".aws/config", "id_rsa.pub", "keys.py")]
        [True, True, False, False]
    """
    *folders, last = name.lower().split("/")
    if _FOLDERS_OF_KEYS & set(folders):
        return True
    is_key = any(fnmatch.fnmatchcase(last, pattern) for pattern in _KEYS)
    return is_key and not any(fnmatch.fnmatchcase(last, pattern) for pattern in _NO_KEYS)


def _matches(name: str, pattern: str) -> bool:
    pattern = pattern.removeprefix("./")
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name.rpartition("/")[2], pattern)


def _link_within(folder: Path, path: Path) -> str:
    """Return the target of a link, relative to the link; "" if it is outside the folder."""
    root, target = os.path.realpath(folder), os.path.realpath(path)
    if target != root and not target.startswith(f"{root}{os.sep}"):
        return ""
    return os.path.relpath(target, os.path.realpath(path.parent))


def _check_size(choice: SyncFilter) -> None:
    nbytes, count = choice.nbytes, len(choice.entries)
    if nbytes <= MOST_BYTES and count <= MOST_FILES:
        return
    sizes: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for entry in choice.entries:
        first, slash, _ = entry.path.partition("/")
        for kind, more in enumerate((1, entry.size)):
            sizes[first + slash][kind] += more
    by = 1 if nbytes > MOST_BYTES else 0
    largest = sorted(sizes.items(), key=lambda one: -one[1][by])[:_SHOWN]
    shown = ", ".join(f"{name} {units.files(*size)}" for name, size in largest)
    raise UsageError(
        f"{choice.folder} has {units.files(count, nbytes)} to send: {shown}; exclude files with a "
        ".gitignore, or send all with --sync-large (sync_large=True) or %ddp_sync --large"
    )
