"""Starting and stopping ranks. Each test has a new session."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

import psutil
import pytest

import ddp_notebook
from ddp_notebook.errors import HostError, SessionBrokenError, StartError, StartTimeoutError, UsageError
from ddp_notebook.launch import warm
from tests.conftest import wait_until, waiting_host

FORK = pytest.param({}, id="fork")
SPAWN = pytest.param({"DDP_NOTEBOOK_START_METHOD": "spawn"}, id="spawn", marks=pytest.mark.long)


@pytest.mark.parametrize("env", [FORK, SPAWN])
def test_both_start_paths(make_session, waiting_host_server, monkeypatch, tmp_path, env):
    """Ranks have the notebook's present environment, directory and module path, and their own stdin and seeds. A fork
    of the waiting host server has the directory and the variables of its own start."""
    waiting_host_server()
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SET_AFTER_IMPORT", "yes")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "of_the_user.py").write_text("answer = 42")
    stages: list[str] = []
    session = make_session(2, cold=bool(env), report=stages.append)
    assert ("spawned" in stages[0]) == bool(env)
    session.run(
        "import os, sys, random, numpy, of_the_user\n"
        "seen = os.environ['SET_AFTER_IMPORT'], os.getcwd(), of_the_user.answer, sys.stdin.read()\n"
        "drawn = random.random(), float(numpy.random.rand()), torch.rand(1).item()\n"
        "threads = torch.get_num_threads(), (torch.ones(600, 600) @ torch.ones(600, 600)).sum().item()\n"
        "x = torch.ones(1); dist.all_reduce(x)"
    )
    assert session.pull("seen")[1] == ("yes", str(tmp_path), 42, "")
    drawn = session.pull("drawn")
    assert all(mine != theirs for mine, theirs in zip(drawn[0], drawn[1], strict=True))
    assert session.pull("threads")[0][1] == 600.0**3
    assert session.pull("x")[0].item() == 2.0


@pytest.mark.long
def test_threads_of_the_ranks_are_raised_after_the_fork(make_session):
    session = make_session(2, env={"OMP_NUM_THREADS": "2"})
    session.run(
        "from threadpoolctl import threadpool_info\n"
        "import numpy\n"
        "(torch.ones(600, 600) @ torch.ones(600, 600)).sum(); numpy.ones((600, 600)) @ numpy.ones((600, 600))\n"
        "found = torch.get_num_threads(), {p['num_threads'] for p in threadpool_info() if p['user_api'] == 'blas'}"
    )
    assert session.pull("found") == {0: (2, {2}), 1: (2, {2})}


def test_who_asks_a_session_that_starts_is_told_so(make_session):
    told: list[str] = []

    def ask(stage: str) -> None:
        if not told:  # at the first stage there are no ranks
            for question in (lambda s: s.pull("rank"), lambda s: s.run("1"), lambda s: s.ranks.epoch):
                with pytest.raises(SessionBrokenError, match="has no ranks yet: wait until its start has ended"):
                    question(ddp_notebook.current())
            told.append(repr(ddp_notebook.current()))

    make_session(1, report=ask)
    assert told == ["<Session: starting>"]


@pytest.mark.long
def test_a_waiting_host_server_with_another_variable_is_replaced(make_session):
    """torch reads this variable when it is imported."""
    session = make_session(1, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    assert session.run("str(dist.get_debug_level())")[0].result == "'DebugLevel.DETAIL'"


@pytest.mark.long
def test_the_controller_starts_with_engines_that_cannot_wait(make_session, tmp_path, monkeypatch):
    """The registration of another ipyparallel version has other parts."""
    (tmp_path / "sitecustomize.py").write_text(
        "from ipyparallel.engine.app import IPEngine\n"
        "complete = IPEngine.complete_registration\n"
        "IPEngine.complete_registration = lambda self, *parts: complete(self, *parts)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    session = make_session(2)
    assert len(session.ranks.pids("controller")) == 1
    assert session.client[:].apply_sync(os.getpid) == session.ranks.pids()
    assert session.run("dist.barrier()").ok


@pytest.mark.long
def test_stop_twice(make_session):
    session = make_session(1)
    assert session.client.ids == [0]
    pids = [*session.ranks.pids(), *session.ranks.pids("store"), *session.ranks.pids("controller")]
    assert len(pids) == 3
    session.stop()
    session.stop()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert ddp_notebook.current() is None
    assert repr(session) == "<Session: stopped>"
    for refused in (session.ranks.heal, session.interrupt, session.status):
        with pytest.raises(SessionBrokenError, match=r"^this session was stopped; start another with %ddp_start$"):
            refused()


def test_what_shows_the_ranks_is_told_once_before_they_end(make_session, caplog):
    session = make_session(1)
    called: list[Any] = []

    def fail():
        called.append("first")
        raise ZeroDivisionError

    session.ranks.when_stopped(fail)
    session.ranks.when_stopped(lambda: called.append(session["rank"][0]))
    session.stop()
    session.stop()
    assert called == ["first", 0]
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.processes
def test_a_bad_option_starts_nothing(waiting_host_server):
    waiting_host_server()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"world_size": 0}, "N must be at least 1"),
        ({"world_size": 2, "backend": "smoke"}, "unknown backend 'smoke'"),
        ({"world_size": 2, "backend": "mpi"}, "built without mpi"),
        ({"world_size": 2, "backend": "nccl"}, "nccl"),
        ({"world_size": 2, "gpus": ("0",)}, "shows no GPU"),
    ]
    for options, text in cases:
        with pytest.raises(UsageError, match=text):
            ddp_notebook.start(**options)
        assert ddp_notebook.current() is None


@pytest.mark.slow
def test_a_torch_that_is_too_old_is_named(tmp_path, monkeypatch):
    """The check is done before the import of parts that the old torch does not have. (A real torch 2.10 is gigabytes
    large.)"""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("__version__ = '2.10.0+cu128'\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    message = (
        r"torch 2\.10\.0\+cu128 is installed, and ddp_notebook needs 2\.11 or later: pip install \"torch>=2\.11\"$"
    )
    with pytest.raises(StartError, match=message) as error:
        ddp_notebook.start(2)
    assert "Traceback" not in str(error.value)


@pytest.mark.long
def test_a_session_whose_host_server_is_gone_is_not_reused(make_session):
    session = make_session(2)
    os.kill(session.ranks.pids("host server")[0], signal.SIGKILL)
    wait_until(lambda: not session.is_running, what="the end of the host server is known")
    with ddp_notebook.start(2, reuse=True) as fresh:
        assert fresh is not session and fresh.run("rank").ok


_TELLS_ABOUT_NEW_VARIABLES = """
import os, sys, threading

def tell(event, args):
    # Whoever connects has its place in the environment: behind it no variable may be new, and in no other thread.
    if event != "os.putenv" or os.fsdecode(args[0]) in os.environ:
        return
    is_late = "TORCHELASTIC_MAX_RESTARTS" in os.environ or threading.current_thread() is not threading.main_thread()
    with open({path!r}, "a") as file:
        print(os.fsdecode(args[0]), "late" if is_late else "in time", file=file)

sys.addaudithook(tell)
"""


@pytest.mark.long
def test_no_variable_is_added_while_a_group_forms(make_session, monkeypatch, tmp_path):
    """C code in the connecting thread reads the environment at the same time, and would crash now and then."""
    seen = tmp_path / "seen"
    (tmp_path / "sitecustomize.py").write_text(_TELLS_ABOUT_NEW_VARIABLES.format(path=str(seen)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    for name in ("TERM", "PAGER", "MPLBACKEND", "PYDEVD_DISABLE_FILE_VALIDATION", "PYDEVD_USE_FRAME_EVAL"):
        monkeypatch.delenv(name, raising=False)  # some of the variables that an engine adds

    make_session(2, cold=True)

    lines = seen.read_text().splitlines()
    assert {"RANK in time", "PAGER in time", "PYDEVD_USE_FRAME_EVAL in time"} <= set(lines)
    assert [line for line in lines if line.endswith("late")] == []


@pytest.mark.long
@pytest.mark.parametrize("more", ["", "x" * 100_000], ids=["", "before_it_was_told_all"])
def test_a_rank_that_dies_while_starting_leaves_its_last_words(tmp_path, monkeypatch, more):
    """A sitecustomize of the user breaks the rank: the spawned process ends before its first message. A pipe holds only
    a part of a long environment. In this case the process ends while the host server still writes."""
    monkeypatch.setenv("MORE", more)
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if 'spawned' in ' '.join(sys.orig_argv):\n"
        "    os.write(2, b'the disk is on fire\\n'); os._exit(3)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.setenv("DDP_NOTEBOOK_START_METHOD", "spawn")
    with pytest.raises(StartError, match=r"died while waiting for.*exited with status 3(.|\n)*the disk is on fire"):
        ddp_notebook.start(2)


@pytest.mark.long
def test_a_start_timeout_names_the_stage_and_the_ranks(tmp_path, monkeypatch, waiting_host_server):
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\nif 'spawned' in ' '.join(sys.orig_argv): signal.pause()\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.setenv("DDP_NOTEBOOK_START_METHOD", "spawn")
    warm.drop()  # the host server of an earlier test has imported torch already
    began_s = time.monotonic()
    waiting_host_server()
    waiting_host().facts()  # a host server imports torch, and one that spawns is started again; this takes time too
    timeout_s = 2.0 + 2 * (time.monotonic() - began_s)
    with pytest.raises(StartTimeoutError, match=r"waiting for the processes to connect, and ranks 0-1 did not"):
        ddp_notebook.start(2, timeout_s=timeout_s)


@pytest.mark.long
def test_a_rank_that_is_killed_while_starting(make_session):
    def kill_one(stage: str) -> None:
        if stage.startswith("processes"):
            session = ddp_notebook.current()
            assert session is not None
            os.kill(session.ranks.pids()[1], 9)

    with pytest.raises(StartError, match=r"rank 1 died while waiting for .*killed by SIGKILL"):
        make_session(2, report=kill_one)
    assert ddp_notebook.current() is None


@pytest.mark.long
def test_a_new_group_on_a_new_store(make_session, monkeypatch):
    """After SIGKILL of the store, cells and the group still work. The next group gets a new store, if necessary at the
    second try."""

    def fail(*_):
        raise HostError("no process left")

    session = make_session(2)
    session.run("kept = torch.arange(3.)")
    (store,) = session.ranks.pids("store")
    os.kill(store, 9)
    wait_until(lambda: not session.ranks.pids("store"))
    with monkeypatch.context() as patch:
        patch.setattr(session._hosts.all[0], "start", fail)
        assert session.run("x = torch.ones(1); dist.all_reduce(x); x")[0].result == "tensor([2.])"
        with pytest.raises(StartError, match="no process left"):
            session.ranks.reform()
    session.ranks.reform()
    assert session.ranks.epoch == 2
    assert session.ranks.pids("store") not in ([], [store])
    result = session.run("x = kept.clone(); dist.all_reduce(x); g = dist.new_group([0, 1]); x")
    assert result[1].result == "tensor([0., 2., 4.])"


@pytest.mark.long
def test_the_host_server_dies_while_the_ranks_start(make_session):
    def kill_it(stage: str) -> None:
        if stage.startswith("processes"):
            session = ddp_notebook.current()
            assert session is not None
            os.kill(session.ranks.pids("host server")[0], 9)

    with pytest.raises(StartError, match=r"the host server .*ended"):
        make_session(2, report=kill_it, timeout_s=60.0)
    assert ddp_notebook.current() is None


@pytest.mark.long
def test_odd_surroundings_of_the_notebook(make_session, monkeypatch, tmp_path):
    """Its directory was deleted, and its module path has an entry that is not text."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])
    session = make_session(1)
    assert session.run("import os; os.getcwd()")[0].result == repr(os.path.expanduser("~"))


@pytest.mark.long
def test_a_second_interrupt_replaces_a_rank_that_does_not_answer(make_session, capsys):
    session = make_session(2)
    session.run("kept = rank")
    for when in (0.5, 3.0):
        threading.Timer(when, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt, match=r"rank 0 was killed by the second press of stop\n  rank 1 had"):
        session.run("if rank == 0: sum(range(10**11))")  # runs in C and holds the interpreter's lock
    shown = capsys.readouterr().err
    assert (
        "not ended yet: rank 0: no answer: cell line 1, in one long call during which no other thread can run" in shown
    )
    assert "s for the prompt, while the cell goes on there, or press stop again to replace it" in shown
    assert "rank 0 was replaced and begins without variables" in shown
    assert session.run("x = torch.ones(1); dist.all_reduce(x); int(x)")[0].result == "2"
    assert session.run("kept", ranks=1)[1].result == "1"
