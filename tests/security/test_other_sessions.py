"""A second user attacks other sessions: with a client, over ssh, with outposts, kept, and torchrun jobs."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

import ddp_notebook
from ddp_notebook.errors import RankError
from ddp_notebook.launch.processes import descendants
from tests.conftest import RUN_MARK, marked_processes, wait_until
from tests.keep.conftest import notebook, runtime  # noqa: F401  # fixtures
from tests.security.attack import Listener, attack
from tests.ssh import sshd
from tests.ssh.conftest import no_notebook, ssh  # noqa: F401  # fixtures
from tests.starters.conftest import sum_of
from tests.starters.test_ipv6 import _Commands, _use
from tests.test_ports import _address
from tests.torchrun.conftest import jobs  # noqa: F401  # a fixture

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can become a second user")
_ONE_MACHINE = {"the session's store, ranks on one machine", "the notebook's wire", "gloo"}
_SEVERAL_HOSTS = {"the session's store, ranks on several hosts", "the notebook's wire", "gloo"}


@pytest.fixture(scope="module")
def python(ssh):  # noqa: F811
    """Return an interpreter of the hosts, whose processes have the mark of this test run."""
    return sshd.python(ssh, variable=RUN_MARK)


def _is_ssh_server(listener: Listener, _: str) -> bool:
    return listener.program == "sshd" and "-D" in psutil.Process(listener.pid).cmdline()


def _is_jupyters(_: Listener, protocol: str) -> bool:
    """Return whether a listener belongs to ipykernel: a kernel without this package has it too."""
    return protocol == "ZeroMQ NULL"


@pytest.mark.long
def test_ipyparallels_controller_answers_nobody_without_its_key(make_session, stranger, tmp_path):
    session = make_session()
    assert session.client[:].apply_sync(os.getpid) == session.ranks.pids()
    controllers = {one.pid for pid in session.ranks.pids("controller") for one in descendants(pid)}
    found = attack(stranger, tmp_path / "marker")
    assert found.rows(controllers) >= {*_ONE_MACHINE, "ipyparallel's controller"}
    found.check_nothing_was_read()
    assert session.client[:].apply_sync(os.getpid) == session.ranks.pids()
    assert not (tmp_path / "marker").exists()


@pytest.mark.long
def test_workers_whose_listeners_were_ended_say_so(make_session, stranger, tmp_path):
    """TensorPipe stops listening after bytes of an unknown protocol. No earlier call has connected the workers."""
    session = make_session()
    start = "from torch.distributed import rpc; rpc.init_rpc(f'worker{rank}', rank=rank, world_size=world_size)"
    session.run(start)
    attack(stranger, tmp_path / "marker")
    with pytest.raises(RankError, match=r"worker1 \(rank 1\) accepts no connection for len: .* %ddp_restart"):
        session.run("if rank == 0: rpc.rpc_sync('worker1', len, ('four',))")
    assert sum_of(session) == ["2", "2"]
    assert not (tmp_path / "marker").exists()


@pytest.mark.long
def test_tasks_that_call_in(monkeypatch, stranger, tmp_path):
    """Each task is a host, so the session's store listens on a network."""
    with ddp_notebook.start(2, mpi=_use(monkeypatch, _Commands(_address(), [[], []]))) as session:
        session.run(
            "import os; dist.TCPStore(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']), is_master=False)"
        )
        found = attack(stranger, tmp_path / "marker")
        assert found.rows() == {*_SEVERAL_HOSTS, "`MASTER_ADDR`"}
        found.check_nothing_was_read()
        assert [said["keys"] for said in found.ports.values() if "keys" in said] == [[]]
        session.run("dist.destroy_process_group(); dist.init_process_group()")
        assert sum_of(session) == ["2", "2"]
    assert not (tmp_path / "marker").exists()


@pytest.mark.long
def test_a_kept_session(notebook, stranger, tmp_path):  # noqa: F811
    kernel = notebook("%ddp_start 2 --keep 1")
    found = attack(stranger, tmp_path / "marker")
    rows = found.rows(ignore=_is_jupyters)
    assert rows == {*_ONE_MACHINE, "kept sessions, torchrun jobs"} | (rows & {"`MASTER_ADDR`"})
    found.check_nothing_was_read(ignore=_is_jupyters)
    assert any(path.endswith(".json") for path in found.paths), "the entry was attacked"
    assert kernel.run("%on_all_ranks rank").stdout == "[0] 0\n[1] 1\n"
    assert not (tmp_path / "marker").exists()


# ---- torchrun jobs

_BODY = """
dist.all_reduce(torch.ones(1))
open(f"ready-{rank}", "w").close()
wait_for("go on")
print(dist.all_reduce(torch.ones(1)))
open(f"done-{rank}", "w").close()
"""


@pytest.mark.long
def test_a_job_of_the_notebook(jobs, stranger, tmp_path):  # noqa: F811
    jobs.script(_BODY)
    code = "from ddp_notebook.torchrun import start_job; start_job.run(start_job.read('--nproc-per-node 2 train.py'))"
    job = subprocess.Popen([sys.executable, "-c", code], cwd=jobs.folder, stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: all((jobs.folder / f"ready-{rank}").exists() for rank in range(2)), 60)
        found = attack(stranger, tmp_path / "marker")
        assert found.rows() == {
            *_ONE_MACHINE,
            "kept sessions, torchrun jobs",
            "`MASTER_ADDR`",
        }, "the rendezvous is a store like the session's"
        found.check_nothing_was_read()
        (jobs.folder / "go on").touch()
        assert job.wait(60) == 0
        assert (jobs.folder / "done-0").exists() and (jobs.folder / "done-1").exists()
    finally:
        job.kill()
        job.communicate()
    assert not (tmp_path / "marker").exists()


@pytest.mark.long
def test_torch_unpickles_the_rendezvous_state_of_a_shell_job(jobs, stranger, tmp_path):  # noqa: F811
    """docs/security.md warns of this. If the test fails, torch has changed: correct the table."""
    process = jobs.start(_BODY)
    wait_until(lambda: all((jobs.folder / f"ready-{rank}").exists() for rank in range(2)), 60)
    found = attack(stranger, marker := tmp_path / "marker")
    assert found.rows() == {"gloo", "`MASTER_ADDR`", "kept sessions, torchrun jobs"}
    wait_until(marker.exists, 30, "torch has unpickled the state")
    process.kill()
    for one in marked_processes():
        one.kill()


# ---- over ssh; the last tests, since the ssh server listens until the module ends


@pytest.mark.long
def test_hosts_over_ssh(python, stranger, tmp_path):
    with ddp_notebook.start(hosts=ddp_notebook.Ssh("one:1,two:1", python=python)) as session:
        found = attack(stranger, tmp_path / "marker")
        assert found.rows(ignore=_is_ssh_server) >= {*_SEVERAL_HOSTS, "ports that ssh forwards", "ssh to a host"}
        found.check_nothing_was_read(ignore=_is_ssh_server)
        assert sum_of(session) == ["2", "2"]
    assert not (tmp_path / "marker").exists()


@pytest.mark.long
def test_a_kept_session_over_ssh(python, notebook, stranger, tmp_path):  # noqa: F811
    kernel = notebook(f"%ddp_start --hosts one:1,two:1 --python {python} --keep 1")

    def ignore(listener: Listener, protocol: str) -> bool:
        return _is_ssh_server(listener, protocol) or _is_jupyters(listener, protocol)

    found = attack(stranger, tmp_path / "marker")
    assert found.rows(ignore=ignore) >= {*_SEVERAL_HOSTS, "kept sessions, torchrun jobs", "kept sessions over ssh"}
    found.check_nothing_was_read(ignore=ignore)
    assert kernel.run("%on_all_ranks rank").stdout == "[0] 0\n[1] 1\n"
    assert kernel.run("%ddp_stop").status == "ok"
    assert not (tmp_path / "marker").exists()
