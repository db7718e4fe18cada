"""Ranks in a Slurm job: two nodes with separate networks, which share this machine's clock and files."""

from __future__ import annotations

import re

import psutil
import pytest

import ddp_notebook
from ddp_notebook.errors import CellTimeoutError, RankDiedError, SessionBrokenError
from tests.conftest import wait_until

pytestmark = pytest.mark.alone  # changes links and addresses of the machine


@pytest.fixture(scope="module")
def session(slurm):
    with ddp_notebook.start(
        4, slurm="-N2 --exclusive -t 1:30:00 -J mine", env={"ASKED": "for"}, grace_s=0.3
    ) as session:
        assert slurm.ask("squeue", "-h", "-o", "%j %D") == "mine 2"
        yield session


def _sum(session) -> list[str]:
    result = session.run("x = torch.ones(1); dist.all_reduce(x); print(int(x))")
    return [result[rank].stdout for rank in result.ranks]


def test_one_task_a_node_has_its_share_of_the_ranks(session):
    result = session.run(
        "import os, socket; print(socket.gethostname(), *(os.environ[name] for name in "
        "('LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'GROUP_RANK', 'SLURM_PROCID', 'ASKED', 'SLURM_JOB_NAME')))"
    )
    said = ["n1 0 2 0 0 for mine\n", "n1 1 2 0 0 for mine\n", "n2 0 2 1 1 for mine\n", "n2 1 2 1 1 for mine\n"]
    assert [result[rank].stdout for rank in range(4)] == said
    assert _sum(session) == ["4\n"] * 4
    assert repr(session) == "<Session: 4 ranks on n1, n2, gloo>"


def test_ranks_and_notebook_connect_by_the_route_to_the_nodes(session, slurm):
    """Not by their names, which Debian maps to loopback addresses."""
    code = "import os, socket; print(os.environ['MASTER_ADDR'], socket.gethostbyname(socket.gethostname()))"
    result = session.run(code)
    assert result[0].stdout == f"{slurm.addresses['n1']} 127.0.1.1\n"


def test_the_time_that_is_left_is_in_the_status(session):
    said = repr(session.status()).splitlines()[-1]
    assert re.fullmatch(r"Slurm job \d+ runs on n\[1-2\], 1 h (30|29) min left", said)


def test_a_deadlock_across_nodes_is_freed(session):
    session.run("kept = rank + 40")
    with pytest.raises(CellTimeoutError, match="from rank 2"):
        session.run("dist.recv(torch.ones(1), (rank + 1) % 4)", timeout_s=0.3)
    assert session.run("print(kept)")[3].stdout == "43\n" and _sum(session) == ["4\n"] * 4


@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_of_either_node_is_replaced(session, rank):
    with pytest.raises(RankDiedError):
        session.run(f"import os\nif rank == {rank}: os.kill(os.getpid(), 9)\ndist.barrier()")
    session.ranks.heal()
    assert _sum(session) == ["4\n"] * 4


def test_a_rank_says_nothing_of_a_sigterm_that_ends_its_job(session):
    result = session.run("import os, signal, time; os.kill(os.getpid(), signal.SIGTERM); time.sleep(0.1); print('on')")
    assert [result[rank].stdout + result[rank].stderr for rank in range(4)] == ["on\n"] * 4


def test_nothing_is_left_of_a_session(slurm, session):
    pids = [*session.ranks.pids(), *session.ranks.pids("store"), *session.ranks.pids("host server")]
    assert len(pids) == 7
    session.stop()
    assert slurm.jobs() == [] and list(slurm.shared_folder.iterdir()) == []
    wait_until(lambda: not any(map(psutil.pid_exists, pids)))


def test_a_job_that_is_cancelled_ends_the_cell_with_a_sentence(slurm, capsys):
    with ddp_notebook.start(slurm="-N1 -t 9") as session:
        [job] = slurm.jobs()
        assert session.world_size == 1
        session.run("import time; time.sleep(1.5)")
        line = f"Slurm job {job} ends in 9 min, and all ranks with it: save your data now\n"
        assert capsys.readouterr().err == line
        later = session.submit("import time; time.sleep(60)")
        slurm.ask("scancel", job)
        with pytest.raises(
            SessionBrokenError, match=f"Slurm job {job} was cancelled, by scancel or by an administrator"
        ):
            later.result(timeout=10)
        assert "and the session are lost; %ddp_restart starts new ranks" in repr(session.status())
