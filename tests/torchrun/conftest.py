"""torchrun jobs with real agents and workers, in a separate runtime folder for each test."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from ddp_notebook.registry import entries, lookup
from ddp_notebook.torchrun.job import TorchrunJob
from tests.conftest import wait_until

_START_S = 60.0
_END_S = 40.0  # torchrun gives its workers 30 s
HEAD = """
import os, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import ddp_notebook
dist.init_process_group("gloo")
rank = dist.get_rank()
def wait_for(name):
    while not os.path.exists(name):
        time.sleep(0.01)
def train(steps):
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        ddp_notebook.log(loss=loss)
"""


# Replaces the head, for a script that does not import torch.
WAITS = "import os, time\nwhile not os.path.exists('end'): time.sleep(0.01)\n"


class Jobs:
    """Starts jobs, and attaches to them."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self._stack = stack

    def script(self, body: str, name: str = "train.py", head: str = HEAD) -> Path:
        path = self.folder / name
        path.write_text(head + body)
        return path

    def start(self, body: str, *options: str, name: str = "train.py", head: str = HEAD) -> subprocess.Popen[str]:
        """Start torchrun with two ranks of a script, whose head defines `rank`, `wait_for(file)`, `train(steps)`."""
        script = self.script(body, name, head)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *options]
        process = subprocess.Popen(
            [*command, "-m", "ddp_notebook.attach", str(script), "--lr", "1"],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._stack.callback(self._end, process)
        return process

    def _end(self, process: subprocess.Popen[str]) -> None:
        self.touch("end")  # scripts may wait for it
        process.terminate()
        try:
            process.communicate(timeout=_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise

    def attach(self, name: str = "train", take_over: bool = False) -> TorchrunJob:
        """Attach to a job when both ranks are registered."""
        wait_until(lambda: sum(one.name.startswith(name) for one in self.ranks()) == 2, _START_S)
        found = lookup.find(name)
        job = TorchrunJob(found.key, found.name, take_over=take_over)
        self._stack.callback(job.close)
        wait_until(lambda: job.round is not None and job.round.there == [0, 1], _START_S, "both ranks speak")
        return job

    def ranks(self) -> list[entries.Entry]:
        """Return the registered ranks."""
        return entries.entries(lookup.TORCHRUN)

    def touch(self, name: str) -> None:
        (self.folder / name).touch()


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    with ExitStack() as stack:
        yield Jobs(tmp_path, stack)
