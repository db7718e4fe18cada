"""The names of the files in a folder that git would not ignore, as git itself says."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ddp_notebook.errors import UsageError
from ddp_notebook.registry import modes, private

NEVER = {".git", ".hg", ".svn", "__pycache__", ".ipynb_checkpoints"}  # folders that are of no use elsewhere
_ENVIRONMENT = "pyvenv.cfg"  # what a virtual environment has, which holds paths and binaries of its machine
_OF_WHOLE_TREE = ("ls-files", "-z", "--cached", "--others", "--exclude-standard")


def names(folder: Path) -> list[str]:
    """The files and links below a folder, sorted, with "/" between the parts of a name.

    Where the folder is in a work tree, git names what is tracked or not ignored. Elsewhere an empty repository stands
    in for it, so that the folder's own `.gitignore` files count.

    Raises:
        UsageError: there is a `.gitignore`, and git is not installed or refuses to look.
    """
    found = sorted(set(_below(folder)))
    environments = [name.removesuffix(_ENVIRONMENT) for name in found if name.endswith(f"/{_ENVIRONMENT}")]
    return [name for name in found if not (name.startswith(tuple(environments)) or NEVER & set(name.split("/")[:-1]))]


def _below(folder: Path) -> Iterator[str]:
    """What git lists, and the same of repositories within."""
    for name in _listed(folder):
        path = folder / name
        if path.is_dir() and not path.is_symlink():  # git names a repository within, and not what is in it
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
        raise UsageError(f"git does not look into {folder}: {inside.stderr.strip()}")
    if inside.stdout.strip() == "true" and _git(folder, "check-ignore", "--quiet", ".").returncode != 0:
        return _names(_git(folder, *_OF_WHOLE_TREE), folder)
    with tempfile.TemporaryDirectory(prefix="ddp_notebook-", dir=private.temporary()) as directory:
        os.chmod(directory, modes.FOLDER)
        empty = f"--git-dir={directory}/.git"
        _git(folder, "init", "--quiet", directory)
        return _names(_git(folder, empty, f"--work-tree={folder}", *_OF_WHOLE_TREE), folder)


def _git(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}  # of another repository
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
    """Without git."""
    for place, folders, files in os.walk(folder):
        if ".gitignore" in files:
            raise UsageError(f"{place} has a .gitignore, which git itself reads here; install git, or remove that file")
        for name in list(folders):
            if name in NEVER:
                folders.remove(name)
            elif os.path.islink(os.path.join(place, name)):
                files.append(name)
        yield from (os.path.relpath(os.path.join(place, name), folder) for name in files)
