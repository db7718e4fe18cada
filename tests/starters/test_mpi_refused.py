"""Options that mpirun rejects, and programs that cannot start: one sentence each, and nothing is left."""

from __future__ import annotations

import pytest

import ddp_notebook
from ddp_notebook.errors import StartError, StartTimeoutError, UsageError
from ddp_notebook.launch.starters.mpi import MpiStarter
from ddp_notebook.launch.transports.outpost import task_of
from tests.ssh import sshd
from tests.starters.conftest import invitations, need_mpi

pytestmark = need_mpi


@pytest.mark.processes
@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "-np 64",
            "no task connected to the notebook: mpirun -np 64: There are not enough slots .* add --oversubscribe",
        ),
        ("--hostfile nowhere", "unable to open the hostfile: nowhere .*; its path is relative to /"),
        (
            "--host nowhere.invalid",
            "ssh: Could not resolve hostname .*; check the spelling of the name, and ~/.ssh/config",
        ),
        ("--host 127.0.0.9", "ssh: connect to host 127.0.0.9 port 22: .*; check that an ssh server runs there"),
        ("--such-a-thing", 'unknown option "--such-a-thing"'),
        ("-np 2 --map-by ppr:1:node", "requested more processes than the ppr for this topology can support"),
    ],
)
def test_what_mpirun_refuses_is_said_with_its_words(line, words, cache):
    with pytest.raises(StartError, match=words):
        ddp_notebook.start(mpi=line)
    assert ddp_notebook.current() is None and invitations(cache) == []


@pytest.mark.processes
def test_the_ssh_of_the_site(tmp_path, monkeypatch):
    site = tmp_path / "site.toml"
    site.write_text('[ssh]\ncommand = "/no/such/ssh -F here"\n')
    monkeypatch.setenv("DDP_NOTEBOOK_CONFIG", str(site))
    monkeypatch.delenv("DDP_NOTEBOOK_SSH", raising=False)
    with pytest.raises(StartError, match="/no/such/ssh"):
        ddp_notebook.start(mpi="--host nowhere.invalid")


@pytest.mark.processes
def test_a_python_that_is_not_there():
    with pytest.raises(
        StartError, match=r"Executable: /no/such/python .*; pass the path of a Python with torch .* --python"
    ):
        ddp_notebook.start(mpi=ddp_notebook.Mpi("", python="/no/such/python"))


@pytest.mark.slow
def test_a_python_without_torch(tmp_path):
    (tmp_path / "psutil.py").write_text("raise ModuleNotFoundError(\"No module named 'psutil'\")")
    python = sshd.python(tmp_path, variable=f'PYTHONPATH="{tmp_path}:$PYTHONPATH"')
    with pytest.raises(
        StartError, match="mpirun: ModuleNotFoundError: No module named 'psutil'; install it on that host too"
    ):
        ddp_notebook.start(mpi=ddp_notebook.Mpi("", python=python))


def test_a_line_that_cannot_be_read():
    with pytest.raises(UsageError, match=r"--mpi .* cannot be read: No closing quotation"):
        ddp_notebook.start(mpi="-np 1 'x")


@pytest.mark.processes
def test_without_mpirun(monkeypatch):
    monkeypatch.setenv("PATH", "/no/such")
    with pytest.raises(StartError, match=r"mpirun cannot be run: .*; install Open MPI"):
        ddp_notebook.start(mpi="")


@pytest.mark.long
def test_ranks_that_do_not_divide_leave_nothing(cache):
    with pytest.raises(UsageError, match=r"3 ranks do not divide among .*: ask for a multiple of 2"):
        ddp_notebook.start(3, mpi="-np 2 --oversubscribe")
    assert invitations(cache) == []


@pytest.mark.processes
def test_it_listens_no_wider_than_the_route_needs(tmp_path):
    (tmp_path / "hosts").write_text("# two\n127.0.0.1 slots=2\n\n198.51.100.7 slots=4 # RFC 5737\n")
    assert MpiStarter("").address == MpiStarter("--host localhost:2").address == "127.0.0.1"
    beyond = MpiStarter("-H 198.51.100.7").address
    assert beyond == MpiStarter(f"--hostfile {tmp_path}/hosts -np 2").address


@pytest.mark.long
def test_a_start_that_takes_too_long_leaves_nothing(cache):
    with pytest.raises(StartTimeoutError, match="the start took too long: no"):
        ddp_notebook.start(mpi="-np 2 --oversubscribe", timeout_s=0.05)
    assert invitations(cache) == []


def test_a_task_of_mpirun_in_a_job_of_slurm_knows_its_number():
    """The job's variables describe mpirun's own daemons."""
    of_slurm = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}
    assert task_of({**of_slurm, "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}) == (3, 4)
    assert task_of({**of_slurm, "PMI_RANK": "3", "PMI_SIZE": "4"}) == (3, 4)
    assert task_of({}) == (-1, 0)


@pytest.mark.processes
def test_what_would_be_run_is_shown():
    shown = MpiStarter("--hostfile 'my hosts'").preview()
    assert shown.startswith("mpirun -x DDP_NOTEBOOK_INVITATION ") and "--map-by ppr:1:node --bind-to none" in shown
    assert "--hostfile 'my hosts' python -m ddp_notebook.launch.transports.outpost" in shown
    for line in ("-np 4 --bind-to core", "--map-by slot:PE=4"):
        assert "ppr:1:node" not in MpiStarter(line).preview() and "none" not in MpiStarter(line).preview()
