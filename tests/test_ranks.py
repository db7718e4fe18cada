"""Ranks that were started: their directory, their process group and their processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import ddp_notebook
from ddp_notebook.errors import RankError, SessionExistsError
from ddp_notebook.launch import processes
from ddp_notebook.magics import DDPMagics
from ddp_notebook.rank.cell import isolation
from tests.conftest import net_connections


def test_ranks_are_in_a_group(session):
    result = session.run("x = torch.full((2,), float(rank + 1), device=device)\ndist.all_reduce(x)\nx")
    assert [result[rank].result for rank in (0, 1)] == ["tensor([3., 3.])"] * 2
    assert ddp_notebook.current() is session
    assert "2 ranks" in repr(session) and "gloo" in repr(session)


def test_torchrun_conventions(session):
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"]
    session.run(f"import os; env = {{name: os.environ.get(name) for name in {names}}}")
    for rank, env in session.pull("env").items():
        port = env.pop("MASTER_PORT")
        assert port.isdigit()
        assert env == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
        }


def test_torchrun_is_what_libraries_think_has_started_the_ranks(session):
    """The ranks have all variables of torchrun except the store of its agent. accelerate is told that they have no
    GPU."""
    session.run(
        "import os; env = {name: os.environ[name] for name in os.environ if 'TORCHELASTIC' in name or 'ROLE' in name}\n"
        "others = [os.environ.get(name) for name in ('GROUP_WORLD_SIZE', 'ACCELERATE_USE_CPU', 'FORK_LAUNCHED')]"
    )
    for rank, env in session.pull("env").items():
        assert env.pop("TORCHELASTIC_RUN_ID")
        assert env == {
            "ROLE_NAME": "default",
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": "2",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
        }
    assert session.pull("others")[0] == ["1", "true", "1"]
    assert session.run("dist.is_torchelastic_launched()")[1].result == "True"


def test_names_in_the_namespace(session):
    session.run("names = (rank, local_rank, world_size, str(device), torch.__name__, dist.__name__)")
    assert session.pull("names")[1] == (1, 1, 2, "cpu", "torch", "torch.distributed")


def test_the_group_timeout_is_torchs_own_once_formed(session):
    session.run("seconds = dist.group.WORLD._get_backend(device).options._timeout.total_seconds()")
    assert set(session.pull("seconds").values()) == {1800.0}
    session.run("seconds = dist.distributed_c10d._get_default_store().timeout.total_seconds()")
    assert set(session.pull("seconds").values()) == {1800.0}  # later groups use the store for their rendezvous


def test_cores_are_shared_between_ranks(session):
    session.run("threads = torch.get_num_threads()")
    expected = max(1, len(os.sched_getaffinity(0)) // 2)
    assert set(session.pull("threads").values()) == {expected}


def test_the_host_server_imports_and_nothing_else(session):
    (server,) = session.ranks.pids("host server")
    threads = os.listdir(f"/proc/{server}/task")
    assert len(threads) == 1, [Path(f"/proc/{server}/task/{t}/comm").read_text() for t in threads]
    maps = Path(f"/proc/{server}/maps").read_text()
    assert "libtorch_cpu" in maps and "libcuda.so" not in maps


_PRELOAD = """
import torch
asked = []
for name in ("is_available", "device_count", "init"):
    setattr(torch.cuda, name, lambda *_, name=name: bool(asked.append(name)))
from ddp_notebook.launch.host.preload import preload
preload()
assert not asked, asked
"""


@pytest.mark.long
def test_what_a_host_server_imports_asks_no_driver():
    """NVML starts a thread that stays, and a process with two threads cannot be forked safely."""
    done = subprocess.run([sys.executable, "-c", _PRELOAD], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_every_listening_socket_is_on_loopback(session):
    assert len(session.client.ids) == 2  # and its sockets are usable
    session.run("pg = dist.new_group([0, 1]); x = torch.ones(1); dist.all_reduce(x, group=pg)")
    everyone = {os.getpid(), *(p.pid for pid in session.ranks.pids("host server") for p in processes.descendants(pid))}
    assert len(everyone) > 10
    listening = [
        (pid, connection.laddr.ip)
        for pid in everyone
        for connection in net_connections(psutil.Process(pid))
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(listening) > 20
    assert {ip for _, ip in listening} == {"127.0.0.1"}
    session._parts.client.close()


def test_files_are_private(session):
    directory = Path(session._hosts.all[0].directory)
    assert directory.stat().st_mode & 0o077 == 0
    files = list(directory.rglob("ipcontroller-*.json"))
    assert files and all(file.stat().st_mode & 0o777 == 0o600 for file in files)


def test_no_key_on_any_command_line(session):
    spec = session._cluster._engines._spec
    secrets = [*spec.curve, session._cluster._spawner._keyring._secret.decode()]
    for process in processes.descendants(session.ranks.pids("host server")[0]):
        line = " ".join(process.cmdline())
        assert not any(secret in line for secret in secrets)


def test_a_second_session_is_refused_and_harms_nothing(session):
    with pytest.raises(SessionExistsError, match=r"2 ranks.*%ddp_restart.*%ddp_stop"):
        ddp_notebook.start(2)
    assert session.run("1").ok


@pytest.mark.parametrize(
    "code",
    [
        "breakpoint()",
        "import pdb; pdb.Pdb().set_trace()\n1",
        "import pdb; pdb.run('x = 1')",
        "import pdb; pdb.runcall(lambda: 1)",
        "import bdb, pdb\ntry: 1 / 0\nexcept ZeroDivisionError: pdb.post_mortem()",
    ],
)
def test_a_refused_debugger_leaves_nothing_changed(session, code):
    state = (
        "import sys, signal, threading\n"
        "from torch.distributed import distributed_c10d as c10d\n"
        "print([one._get_backend(device).options._timeout.total_seconds() for one in c10d._world.pg_map])\n"
        "print(sys.gettrace(), threading.gettrace(), sys.getprofile(), signal.getsignal(signal.SIGINT))"
    )
    session.run("trio = dist.new_group([0, 1])")
    before = [session.run(state)[rank].stdout for rank in (0, 1)]
    with pytest.raises(RankError, match=r"(?s)RuntimeError: .*(accepts no input|debugger).*\(ranks 0-1\)"):
        session.run(code)
    assert [session.run(state)[rank].stdout for rank in (0, 1)] == before
    session.run("dist.destroy_process_group(trio)")


_OF_NOTEBOOK = {  # names that would start, check or attach to ranks, or take them over
    "start": "ddp_notebook.start(2)",
    "start again": "ddp_notebook.start(2, reuse=True)",
    "a session": "ddp_notebook.Session(StartOptions(world_size=2))",
    "a kept one": "ddp_notebook.start(2, keep=ddp_notebook.Keep(hours=1))",
    "check": "ddp_notebook.check(hosts='localhost')",
    "check here": "ddp_notebook.check()",
    "attach": "ddp_notebook.attach_session()",
    "take over": "ddp_notebook.attach_session('kept-1', take_over=True)",
    "a job": "ddp_notebook.attach_job()",
    "torchrun": "from ddp_notebook.torchrun import start_job; start_job.run(start_job.read('train.py'))",
    "the extension": "%load_ext ddp_notebook",
    "the extension and the magic": "%load_ext ddp_notebook\n%ddp_start 2",
    "the extension again": "%reload_ext ddp_notebook",
    "the magics": "from ddp_notebook import magics\nmagics.load(get_ipython())\n%ddp_start 2",
    "a magic": "from ddp_notebook import magics\nmagics.load(get_ipython())\n%ddp_attach kept-1 --take-over",
    "a check": "from ddp_notebook import magics\nmagics.load(get_ipython())\n%ddp_start 2 --check",
}


@pytest.mark.parametrize("code", _OF_NOTEBOOK.values(), ids=_OF_NOTEBOOK)
def test_a_rank_starts_and_attaches_to_no_ranks(session, code):
    before = processes.descendants(session.ranks.pids("host server")[0])
    with pytest.raises(
        RankError, match=r"UsageError: .* must run in the notebook, but this process is a rank: .*\(ranks 0-1\)"
    ):
        session.run(f"import ddp_notebook\nfrom ddp_notebook.launch.options import StartOptions\n{code}")
    assert processes.descendants(session.ranks.pids("host server")[0]) == before


def test_a_session_is_reused_where_it_is_as_asked_for(session):
    assert ddp_notebook.start(2, reuse=True) is session
    assert ddp_notebook.start(reuse=True, timeout_s=5) is session, "any number, and the start is over"
    wrong = (
        r"^<Session: 2 ranks on .*, gloo> cannot be reused: its world_size is 2, not 3, and its grace_s is 3.0, not 5;"
    )
    with pytest.raises(SessionExistsError, match=wrong + r".* end it with %ddp_stop \(session.stop\(\)\)$"):
        ddp_notebook.start(3, grace_s=5, reuse=True)
    assert session.run("1").ok


def test_every_magic_of_the_notebook_is_known_to_ranks():
    registered = {kind: sorted(names) for kind, names in DDPMagics.magics.items()}
    assert {kind: sorted(names) for kind, names in isolation.NOTEBOOK_MAGICS.items()} == registered
