"""Ranks in tasks that mpirun has started on two hosts by ssh."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

import ddp_notebook
from ddp_notebook.errors import CellTimeoutError
from ddp_notebook.launch.processes import descendants
from tests.conftest import marked_processes, net_connections, wait_until
from tests.ssh import namespaces, sshd
from tests.starters.conftest import command_lines, invitations, need_mpi, said, secret_of, send_to_all_below, sum_of

pytestmark = [need_mpi, pytest.mark.alone]  # changes links and addresses of the machine


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    """Return two hosts, the options of mpirun for them, and a Python on them."""
    directory = tmp_path_factory.mktemp("network")
    with namespaces.hosts(directory, "a", "b") as made, pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDP_NOTEBOOK_SSH", made.command)
        file = directory / "hosts"
        file.write_text("".join(f"{name} slots=2\n" for name in made.addresses))  # only ssh knows these names
        yield f"--hostfile {file}", sshd.python(directory)


@pytest.mark.long
def test_two_hosts(network, cache):
    line, python = network
    with ddp_notebook.start(4, mpi=ddp_notebook.Mpi(line, python=python, ports="40000-40100")) as session:
        ours = [one.laddr for one in net_connections(psutil.Process()) if one.status == "LISTEN"]
        ports = [port for host, port in ours if not host.startswith("127.")]
        assert len(ports) == 3 and all(40000 <= port <= 40100 for port in ports), "tasks, wire and its large data"
        assert 40000 <= int(said(session, "import os; print(os.environ['MASTER_PORT'])")[0]) <= 40100
        assert sum_of(session) == ["4"] * 4
        place = (
            "print(*(os.environ[n] for n in ('GROUP_RANK', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'GLOO_SOCKET_IFNAME')))"
        )
        assert said(session, "import os; " + place) == ["0 0 2 eth0", "0 1 2 eth0", "1 0 2 eth0", "1 1 2 eth0"]
        secret = secret_of(session)
        assert "orted" in command_lines() and secret not in command_lines()
        send_to_all_below(signal.SIGINT)
        with pytest.raises(CellTimeoutError):
            session.run("dist.recv(torch.ones(1), (rank + 2) % 4)", timeout_s=0.3)
        assert sum_of(session) == ["4"] * 4
        pids = [*session.ranks.pids(), *session.ranks.pids("host server")]
        assert session.client.ids == [0, 1, 2, 3] and session.client[:].apply_sync(os.getpid) == session.ranks.pids()
        (controller,) = session.ranks.pids("controller")
        listening = _listens_on(controller)
        assert {at.ip for at in listening} == {"127.0.0.1", session._hosts.listening.host}  # type: ignore[attr-defined]
        assert all(40000 <= at.port <= 40100 for at in listening if at.ip != "127.0.0.1")
        pids.append(controller)
    assert not any(map(psutil.pid_exists, pids))


def _listens_on(pid: int) -> set[Any]:
    """Return the addresses on which a process and its descendants listen."""
    below = descendants(pid)
    return {one.laddr for process in below for one in net_connections(process) if one.status == psutil.CONN_LISTEN}


_OWNER = """
import ddp_notebook
with ddp_notebook.start(mpi=ddp_notebook.Mpi({line!r}, python={python!r}, lease_s=5.0)) as session:
    print(*session.ranks.pids(), *session.ranks.pids("host server"), flush=True)
    session.run("import time; time.sleep(1000)")
"""


@pytest.fixture
def short_folder():
    """Yield a folder with a short path: Open MPI has sockets in TMPDIR, and rejects long paths."""
    with tempfile.TemporaryDirectory() as directory:
        yield directory


@pytest.mark.long
@pytest.mark.parametrize("killed", ["mpirun", "notebook"])
def test_what_is_killed_ends_all(network, killed, cache, short_folder):
    """Isolated hosts end all processes after their lease. mpirun ends its tasks at once."""
    line, python = network
    code = _OWNER.format(line=line, python=python)
    env = {**os.environ, "TMPDIR": short_folder}
    owner = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )
    assert owner.stdout is not None and owner.stderr is not None
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    assert len(pids) == 4, owner.communicate(timeout=20)[1]
    if killed == "mpirun":
        (mpirun,) = (one for one in psutil.Process(owner.pid).children() if one.name().startswith("mpirun"))
        mpirun.kill()
        _, error = owner.communicate(timeout=40)
        assert "it ended with status -9" in error and owner.returncode == 1
    else:
        owner.kill()
        owner.communicate()
    wait_until(lambda: not any(map(psutil.pid_exists, pids)) and not marked_processes(), 45.0)
    assert invitations(cache) == []
    wait_until(lambda: not list(Path(short_folder).glob("ddp_notebook-*")))


@pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed")
@pytest.mark.long
def test_mpi4py_where_each_rank_has_a_task():
    with ddp_notebook.start(mpi="-np 2 --oversubscribe") as session:
        code = "from mpi4py import MPI; c = MPI.COMM_WORLD; print(c.rank, c.size, c.allreduce(rank + 1))"
        assert said(session, code) == ["0 2 3", "1 2 3"]
