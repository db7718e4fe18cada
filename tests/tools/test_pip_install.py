"""The progress that `make` displays during the installation."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tools import pip_install
from tools.pip_install import Progress

TOOL = Path(__file__).parents[2] / "tools" / "pip_install.py"
# Lines in the format of pip 24.0 and 26.0.
LINES = """\
Collecting torch==2.13.0
  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl.metadata (29 kB)
Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (888.1 MB)
Downloading https://files.pythonhosted.org/packages/a/filelock-3.20.0-py3-none-any.whl (16 kB)
Using cached nvidia_cublas-13.1.0-py3-none-manylinux_2_27_x86_64.whl (1.2 GB)
Installing collected packages: nvidia-cublas, filelock, torch
Successfully installed filelock-3.20.0 nvidia-cublas-13.1.0 torch-2.13.0
"""


def test_large_downloads_and_the_installation_get_a_line():
    out = io.StringIO()
    progress = Progress(out)
    for line in LINES.splitlines(keepends=True):
        progress.read(line)
    assert [re.sub(r"^ +\d+ s  ", "", line) for line in out.getvalue().splitlines()] == [
        "downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (888.1 MB)",
        "using cached nvidia_cublas-13.1.0-py3-none-manylinux_2_27_x86_64.whl (1.2 GB)",
        "installing 3 packages",
    ]


def test_silence_shows_the_time(monkeypatch):
    monkeypatch.setattr(pip_install, "_EVERY_S", 0.05)
    out = io.StringIO()
    progress = Progress(out)
    progress.show_time()
    assert out.getvalue() == "", "it has only begun"

    def shown() -> str:
        progress.show_time()
        return out.getvalue()

    wait_until(lambda: re.fullmatch(r" +0 s  0 packages downloaded so far\n", shown()))
    progress.read("Downloading filelock-3.20.0-py3-none-any.whl (16 kB)\n")
    wait_until(lambda: shown().endswith(" s  1 package downloaded so far\n"))
    progress.read("Installing collected packages: filelock, torch\n")
    wait_until(lambda: shown().count(" s  installing 2 packages\n") == 2)


@pytest.mark.long
def test_a_failure_shows_what_pip_says(tmp_path):
    command = [sys.executable, str(TOOL), "--no-index", "no_such_package_of_ddp_notebook"]
    failed = subprocess.run(command, capture_output=True, text=True)
    assert failed.returncode == 1
    assert "No matching distribution found for no_such_package_of_ddp_notebook" in failed.stderr
