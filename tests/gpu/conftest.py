"""Fixtures of the GPU tests, and the reasons to skip them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.conftest import VISIBLE_GPUS
from tests.gpu.table import table

_LOOK = """
import json, torch
found = torch.cuda.device_count() if torch.cuda.is_available() else 0
names = [torch.cuda.get_device_name(i) for i in range(found)]
nccl = ".".join(map(str, torch.cuda.nccl.version())) if found else "none"
print(json.dumps([names, f"torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}"]))
"""
_machine: list[str] = []  # description of the machine, for the table


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [
        one
        for outcome in ("passed", "failed", "error", "skipped")
        for one in terminalreporter.getreports(outcome)
        if one.nodeid.startswith("tests/gpu/")
    ]
    if _machine:
        terminalreporter.section("what was seen on GPUs")
        for line in table(_machine[0], reports):
            terminalreporter.write_line(line)


@pytest.fixture(scope="module", autouse=True)
def visible_gpus() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CUDA_VISIBLE_DEVICES")
        if VISIBLE_GPUS is not None:
            patch.setenv("CUDA_VISIBLE_DEVICES", VISIBLE_GPUS)
        yield


@pytest.fixture(scope="module", autouse=True)
def gpus(visible_gpus) -> list[str]:
    """Return the names of the GPUs that torch can use, determined in a separate process."""
    if shutil.which("nvidia-smi") is None:
        pytest.skip("no CUDA device: there is no nvidia-smi")
    env = {**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}  # order of the driver, which this package uses
    asked = subprocess.run([sys.executable, "-c", _LOOK], env=env, capture_output=True, text=True, timeout=120)
    if asked.returncode != 0:
        pytest.skip(f"no CUDA device: torch failed to look for one: {asked.stderr[-500:]}")
    names, versions = json.loads(asked.stdout.splitlines()[-1])
    if not names:
        pytest.skip("no CUDA device that torch can use")
    _machine[:] = [f"{len(names)} x {names[0]}, {versions}"]
    return list(names)
