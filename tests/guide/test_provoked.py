"""Messages of docs/guide/troubleshooting.md that no other test provokes."""

from __future__ import annotations

import numpy as np
import pytest

from ddp_notebook.errors import (
    CellTimeoutError,
    DDPNotebookError,
    MissingBuildError,
    RankDiedError,
    RankError,
    SessionBrokenError,
    StartTimeoutError,
    UsageError,
)
from ddp_notebook.widgets import bundles
from tests.conftest import wait_until


def test_a_cell_with_a_limit(session):
    with pytest.raises(CellTimeoutError, match="the cell took longer than"):
        session.run("while True: pass", timeout_s=0.5, quiet=True)


@pytest.mark.long
def test_a_cell_that_cannot_be_stopped(session):
    with pytest.raises(CellTimeoutError):
        session.run("if rank == 1: sum(range(10**11))", timeout_s=0.3, quiet=True)
    with pytest.raises(SessionBrokenError, match="an earlier cell has not ended on"):
        session.run("1", quiet=True)
    session.interrupt(replace=True)


def test_a_resize_while_a_job_runs(session):
    job = session.submit("__import__('time').sleep(60)", quiet=True)
    wait_until(lambda: job.state == "running", 10)
    with pytest.raises(
        SessionBrokenError, match="a cell is running, and the number of ranks cannot change until it ends"
    ):
        session.ranks.resize(3)
    job.cancel()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("breakpoint()", r"breakpoint\(\) reads commands from the notebook, and this cell accepts no input"),
        ("exit()", r"exit\(\) and quit\(\) do not end a rank; %ddp_stop in the notebook ends them all"),
    ],
)
def test_calls_that_a_rank_refuses(session, code, message):
    with pytest.raises(RankError, match=message):
        session.run(code, quiet=True)


def test_values_that_cannot_be_sent(session):
    with pytest.raises(UsageError, match=r"send it with --force \(force=True\)"):
        session.push(large=np.zeros(150_000_000))  # 1.2 GB that no page holds
    session.run("model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))", quiet=True)
    with pytest.raises(DDPNotebookError, match="It needs the process group of the ranks, which a model in DDP does"):
        session.pull("model")


def test_a_checkout_without_a_build(tmp_path):
    with pytest.raises(MissingBuildError, match="the JavaScript of the monitor is missing"):
        bundles.read(tmp_path / "monitor.js", "the monitor")


def test_a_start_that_takes_too_long(make_session_alone, monkeypatch):
    monkeypatch.setenv("DDP_NOTEBOOK_START_METHOD", "spawn")
    with pytest.raises(StartTimeoutError, match="the start took too long"):
        make_session_alone(2, cold=True, timeout_s=1.5)


@pytest.mark.long
def test_a_collective_after_a_death(make_session_alone):
    session = make_session_alone(2)
    with pytest.raises(RankDiedError):
        session.run("if rank == 1: __import__('os')._exit(3)", quiet=True)
    with pytest.raises(RankError, match="and until then the ranks cannot communicate"):
        session.run("dist.barrier()", quiet=True)
