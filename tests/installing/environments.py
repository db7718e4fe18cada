"""Virtual environments without files of this checkout. torch, which is large, is linked into them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LISTS = ROOT / "tests" / "matrix"
_HIDDEN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "DDP_NOTEBOOK_TEST_IPYKERNEL6", "DDP_NOTEBOOK_TEST_MARIMO")


class Environment:
    """A virtual environment with the running Python.

    Args:
        folder: Folder of the environment.
    """

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=True, symlinks=True)
        self.folder = folder
        self.bin = folder / "bin"
        self.python = self.bin / "python"
        [self.packages] = folder.glob("lib/python*/site-packages")
        if "setuptools" in self.versions():  # Python 3.11 brings one that is too old for torch
            self.pip("uninstall", "-q", "-y", "setuptools")

    def run(self, *arguments: str, before: tuple[str, ...] = (), **variables: str) -> str:
        """Run its Python outside of the checkout. Return the output.

        Args:
            before: Command that runs this one, such as `unshare`.
            variables: Added to the environment of this process, without variables that lead to other packages.

        Raises:
            AssertionError: The command failed; contains its output.
        """
        env = {name: value for name, value in os.environ.items() if name not in _HIDDEN}
        command = [*before, str(self.python), *arguments]
        done = subprocess.run(command, cwd=self.folder, env=env | variables, capture_output=True, text=True)
        assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    def pip(self, *arguments: str, before: tuple[str, ...] = ()) -> str:
        return self.run("-m", "pip", "--disable-pip-version-check", *arguments, before=before)

    def versions(self) -> dict[str, str]:
        """Return the installed versions by name."""
        listed = json.loads(self.pip("list", "--format", "json"))
        return {canonicalize_name(one["name"]): one["version"] for one in listed}

    def lend(self, *names: str) -> None:
        """Link packages of the current environment and their requirements, unless they are installed."""
        present = set(self.versions())
        for one in _with_what_they_need(names):
            if canonicalize_name(one.name) in present:
                continue
            tops = {file.parts[0] for file in one.files or () if file.parts[0] not in ("..", "__pycache__")}
            for top in tops:
                link = self.packages / top
                if not link.exists():
                    link.symlink_to(Path(str(one.locate_file(top))))


def of_list(folder: Path, name: str) -> Environment:
    """Create an environment with the packages of a list, and torch.

    Args:
        folder: Folder of the environment.
        name: "colab" or "kaggle".
    """
    made = Environment(folder)
    made.pip("install", "-q", "--no-deps", "-r", str(LISTS / f"{name}.txt"))
    made.lend("torch")
    return made


def versions_of(name: str) -> dict[str, str]:
    """Return the versions in a list."""
    lines = (LISTS / f"{name}.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(package): version for package, version in pairs}


def _with_what_they_need(names: tuple[str, ...]) -> list[Distribution]:
    here = {canonicalize_name(one.name): one for one in reversed(list(distributions()))}
    found: dict[str, Distribution] = {}
    wanted = list(names)
    while wanted:
        name = canonicalize_name(wanted.pop())
        if name in found or name not in here:  # a package that is not installed here is not required here
            continue
        found[name] = here[name]
        asked = (Requirement(text) for text in here[name].requires or ())
        wanted += [one.name for one in asked if one.marker is None or one.marker.evaluate({"extra": ""})]
    return list(found.values())


def checkout_files(modules: str) -> list[str]:
    """Return the lines of a text that are paths in this checkout."""
    root = str(ROOT)
    return [line for line in modules.splitlines() if re.match(re.escape(root) + r"/(?!\.venv)", line)]


def without_network() -> tuple[str, ...]:
    """Return a command that runs another one with only a loopback interface, for `Environment.run(before=...)`."""
    up = "import fcntl, os, socket, struct, sys\n"
    up += "with socket.socket() as s:\n"
    up += "    fcntl.ioctl(s, 0x8914, struct.pack('16sH14s', b'lo', 0x1 | 0x40, b''))\n"  # SIOCSIFFLAGS: up, running
    up += "os.execvp(sys.argv[1], sys.argv[1:])"
    return (shutil.which("unshare") or "unshare", "--map-root-user", "--net", sys.executable, "-c", up)
