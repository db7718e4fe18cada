"""Two hosts whose ranks reach each other by a network: namespaces of this machine, which share its clock and files."""

from __future__ import annotations

import time

import psutil
import pytest

import ddp_notebook
from ddp_notebook.errors import CellTimeoutError, DDPNotebookError, RankDiedError, RankError
from tests.conftest import wait_until
from tests.ssh import namespaces, sshd

pytestmark = pytest.mark.alone  # links and addresses are the machine's


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    directory = tmp_path_factory.mktemp("network")
    with namespaces.hosts(directory, "a", "b") as made, pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDP_NOTEBOOK_SSH", made.command)
        yield made, sshd.python(directory)


@pytest.fixture(scope="module")
def session(network):
    _, python = network
    with ddp_notebook.start(hosts="a:1,b:1", python=python, grace_s=0.3) as session:
        yield session


def _sum(session) -> list[str]:
    result = session.run("x = torch.ones(1); dist.all_reduce(x); print(int(x))")
    return [result[rank].stdout for rank in result.ranks]


def test_they_reach_each_other_by_the_address_that_ssh_has_used(session):
    result = session.run(
        "import os; print(os.environ['MASTER_ADDR'].startswith('10.79.'), os.environ['GLOO_SOCKET_IFNAME'])"
    )
    assert [result[rank].stdout for rank in (0, 1)] == ["True eth0\n"] * 2
    assert _sum(session) == ["2\n"] * 2


@pytest.mark.parametrize(
    "code",
    [
        "dist.recv(torch.ones(1), 1 - rank)",
        "dist.all_reduce(torch.ones(1)) if rank else __import__('time').sleep(60)",
        "dist.new_group([0, 1]) if rank else __import__('time').sleep(60)",
    ],
    ids=["recv", "all_reduce", "new_group"],
)
def test_a_wait_across_hosts_is_freed(session, code):
    with pytest.raises(CellTimeoutError):
        session.run(code, timeout=0.3)
    assert _sum(session) == ["2\n"] * 2


def test_calls_that_do_not_fit_are_told_before_data_moves(session):
    with pytest.raises(RankError, match="is not the same on all ranks"):
        session.run("dist.all_reduce(torch.ones(rank + 1))")
    assert _sum(session) == ["2\n"] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_of_either_host_is_replaced(session, rank):
    with pytest.raises(RankDiedError):
        session.run(f"import os\nif rank == {rank}: os.kill(os.getpid(), 9)\ndist.barrier()")
    session.heal()
    assert _sum(session) == ["2\n"] * 2


@pytest.mark.long
def test_a_link_that_is_cut(network):
    """The session ends with a sentence, and what was started on the host that is cut off with that one's lease."""
    made, python = network
    with ddp_notebook.start(hosts="a:1,b:1", python=python) as session:
        (rank_a, rank_b), (server_a, server_b) = session.pids(), session.pids("host server")
        (store,) = session.pids("store")
        try:
            made.cut("b")
            began = time.monotonic()
            with pytest.raises(DDPNotebookError, match="the host server on b ended, or the connection to it"):
                session.run("import time\nwhile True: dist.all_reduce(torch.ones(1)); time.sleep(0.2)")
            assert time.monotonic() - began < 25
            wait_until(lambda: not psutil.pid_exists(rank_b) and not psutil.pid_exists(server_b), 45.0)
        finally:
            made.cut("b", is_up=True)
    wait_until(lambda: not any(map(psutil.pid_exists, (rank_a, server_a, store))))
