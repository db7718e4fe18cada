"""Kept sessions in a separate folder, which end with the test."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ddp_notebook import __main__ as shell
from ddp_notebook.registry import entries
from tests.conftest import wait_until
from tests.kernels import NotebookKernel


@pytest.fixture
def runtime(monkeypatch) -> Iterator[Path]:
    """Set the user's runtime directory for this test only. Sessions that are kept there are stopped at the end."""
    folder = Path(tempfile.mkdtemp(prefix="run-", dir="/tmp"))  # the path of a Unix socket must be short
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    yield folder
    for entry in entries.entries():
        shell.main(["stop", entry.name])
    shutil.rmtree(folder)


@pytest.fixture
def notebook(runtime, make_kernel) -> Callable[..., NotebookKernel]:
    """Start a kernel with the extension, without an idle host server."""

    def make(line: str = "") -> Any:
        kernel = make_kernel(env={"XDG_RUNTIME_DIR": str(runtime), "DDP_NOTEBOOK_PRELOAD": "0"})
        kernel.run("%load_ext ddp_notebook")
        if line:
            reply = kernel.run(line)
            assert reply.status == "ok", reply.traceback
        return kernel

    return make


def kill(kernel: NotebookKernel) -> None:
    """Kill the kernel with SIGKILL, and wait until it has ended."""
    os.kill(kernel.pid, signal.SIGKILL)
    assert kernel.manager is not None
    wait_until(lambda: not kernel.manager.is_alive(), what="the kernel is gone")
