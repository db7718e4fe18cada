"""Folder of invitations, and checks that other users cannot see their secrets."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.conftest import below

need_mpi = pytest.mark.skipif(shutil.which("mpirun") is None, reason="no Open MPI: `make cluster-tools` installs it")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Replace ~/.cache by a folder that is empty again after each session."""
    directory = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(directory))
        yield directory / "ddp_notebook"


@pytest.fixture(scope="module")
def make_profile():
    """Write an ipyparallel profile, which is removed after the module."""
    made: list[Path] = []

    def make(name: str, *lines: str) -> Path:
        folder = Path(os.environ["IPYTHONDIR"]) / f"profile_{name}"
        folder.mkdir(parents=True)
        made.append(folder)
        (folder / "ipcluster_config.py").write_text("\n".join(["c = get_config()", *lines, ""]))
        return folder

    yield make
    for folder in made:
        shutil.rmtree(folder, ignore_errors=True)


def files_in(folder: Path) -> set[str]:
    """Return the files that a launcher may have left: logs, scripts, connection files."""
    return {str(file.relative_to(folder)) for file in below(folder) if file.is_file() and file.name != "README"}


def command_lines() -> str:
    """Return all command lines, which every user of this machine can read."""
    return subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True, check=True).stdout


def invitations(cache: Path) -> list[Path]:
    return list(cache.glob("*")) if cache.exists() else []


def send_to_all_below(number: int) -> None:
    """Send a signal like the stop button of VS Code. ssh servers of hosts are children of the test only."""
    for process in psutil.Process(os.getpid()).children(recursive=True):
        if not process.name().startswith("sshd"):
            process.send_signal(number)


def said(session, code: str) -> list[str]:
    """Return the output of each rank."""
    result = session.run(code)
    return [result[rank].stdout.strip() for rank in result.ranks]


def sum_of(session) -> list[str]:
    """Return the sum of a one from each rank, as computed by each rank."""
    return said(session, "x = torch.ones(1); dist.all_reduce(x); print(int(x))")


def secret_of(session) -> str:
    """Return the key in the invitation, which admits its owner."""
    return session._hosts._tasks._arrivals.invitation.secret_key
