"""Ranks in tasks that mpirun has started on this machine, with Debian's Open MPI."""

from __future__ import annotations

import os
import signal

import psutil
import pytest

import ddp_notebook
from ddp_notebook.errors import CellTimeoutError, RankDiedError, SessionBrokenError
from tests.conftest import wait_until
from tests.starters.conftest import command_lines, invitations, need_mpi, said, secret_of, send_to_all_below, sum_of

pytestmark = need_mpi


@pytest.fixture(scope="module")
def session(cache):
    with ddp_notebook.start(4, mpi="-np 2 --oversubscribe", grace_s=0.3) as session:
        yield session
    assert invitations(cache) == []


def test_each_task_has_its_share_of_the_ranks(session):
    assert sum_of(session) == ["4"] * 4
    of_each = (
        "print(*(os.environ[n] for n in ('OMPI_COMM_WORLD_RANK', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'GROUP_RANK')))"
    )
    assert said(session, "import os; " + of_each) == ["0 0 4 0", "0 1 4 0", "1 2 4 0", "1 3 4 0"]


def test_open_mpi_does_not_bind_them(session):
    assert said(session, "import os; print(len(os.sched_getaffinity(0)))") == [str(len(os.sched_getaffinity(0)))] * 4


def test_nobody_sees_the_invitation(session, cache):
    secret = secret_of(session)
    assert "--file" in command_lines() and secret not in command_lines() and invitations(cache) == []
    assert said(session, f"import os; print({secret!r} in str(dict(os.environ)))") == ["False"] * 4


def test_a_deadlock_is_freed(session):
    with pytest.raises(CellTimeoutError):
        session.run("dist.recv(torch.ones(1), (rank + 1) % 4)", timeout_s=0.3)
    assert sum_of(session) == ["4"] * 4


def test_a_rank_is_replaced_in_its_task(session):
    with pytest.raises(RankDiedError):
        session.run("import os\nif rank == 3: os.kill(os.getpid(), 9)\ndist.barrier()")
    session.ranks.heal()
    assert sum_of(session) == ["4"] * 4
    assert said(session, "import os; print(os.environ['OMPI_COMM_WORLD_RANK'])") == ["0", "0", "1", "1"]


@pytest.mark.long
def test_stopped_processes_are_named_or_resumed(session):
    server = psutil.Process(session.ranks.pids()[0]).parent()
    server.suspend()
    try:
        wait_until(lambda: any(host.is_stopped for host in session._parts.cluster.hosts), 3.0)
        with pytest.raises(SessionBrokenError, match=rf"kill -CONT {server.pid} on \S+ resumes it with all variables"):
            session.ranks.heal()
    finally:
        server.resume()
    wait_until(lambda: not any(host.is_stopped for host in session._parts.cluster.hosts), 3.0)

    outpost = server.parent()
    outpost.suspend()
    wait_until(lambda: outpost.status() != psutil.STATUS_STOPPED, 3.0, "its server resumes it")
    assert sum_of(session) == ["4"] * 4


def test_the_stop_button_of_vs_code_ends_nothing(session):
    send_to_all_below(signal.SIGINT)
    assert sum_of(session) == ["4"] * 4
