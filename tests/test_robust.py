"""Damage that a cell can do to its process: undamaged parts continue, and damage is reported and can be healed."""

from __future__ import annotations

import resource

import pytest

from ddp_notebook.errors import RankDiedError, RankError, SessionBrokenError

SUM = "x = torch.ones(1); dist.all_reduce(x); int(x)"


def expect_healthy(session) -> None:
    result = session.run(SUM, timeout_s=30, quiet=True)
    assert [result[rank].result for rank in result.ranks] == ["2", "2"]


GOES_ON = {
    "a fork whose child comes back": "import os\npid = os.fork()\nif pid: os.waitpid(pid, 0)",
    "a fork whose child communicates": (
        "import os\npid = os.fork()\n"
        "if pid == 0:\n"
        "    try: dist.barrier()\n"
        "    finally: os._exit(0)\n"
        "import signal\nos.kill(pid, signal.SIGKILL); os.waitpid(pid, 0)"
    ),
    "handlers of signals": (
        "import signal\nfor number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1): "
        "signal.signal(number, lambda *_: None)"
    ),
    "a blocked SIGINT": (
        "import signal\nold = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})\n"
        "signal.pthread_sigmask(signal.SIG_SETMASK, old)"
    ),
    "another file behind fd 1": "import os\nos.close(1); os.open(os.devnull, os.O_WRONLY)",
    "another directory that is gone": "import os, tempfile\nd = tempfile.mkdtemp(); os.chdir(d); os.rmdir(d)",
    "recursion without end": "def f(): return f()\ntry: f()\nexcept RecursionError: pass",
    "an exit handler": "import atexit; atexit.register(lambda: 1 / 0)",
    "threads that go on": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()"
    ),
}


@pytest.mark.parametrize("code", GOES_ON.values(), ids=GOES_ON)
def test_what_a_cell_leaves_alive_goes_on(session, code):
    session.run("kept = rank + 1")
    session.run(code, timeout_s=30)
    expect_healthy(session)
    assert session.run("kept")[1].result == "2"


def test_closed_streams_of_a_cell_are_open_in_the_next_cell(session):
    with pytest.raises(RankError, match="closed file"):
        session.run("import sys; sys.stdout.close(); print('lost')")
    assert session.run("print('here')")[0].stdout == "here\n"
    expect_healthy(session)


FAILS = {
    "sys.exit": ("import sys; sys.exit(3)", "SystemExit: 3"),
    "exit": ("exit()", "exit\\(\\) and quit\\(\\) do not end a rank"),
    "exit of hydra": (
        "exec('raise SystemExit(1)', {'__name__': 'hydra._internal.utils'})",
        "config_path must be an absolute path",
    ),
    "no memory": ("torch.empty(10**15)", "DefaultCPUAllocator|not enough memory|can't allocate memory"),
    "MemoryError": ("raise MemoryError", "MemoryError"),
    "an error whose __str__ is stopped": (
        "class E(Exception):\n        def __str__(self): raise KeyboardInterrupt\n    raise E",
        "E: <E.__str__ failed>",
    ),
    "an error whose __str__ fails": (
        "class E(Exception):\n        def __str__(self): raise ValueError\n    raise E",
        "E: <E.__str__ failed>",
    ),
    "an error of C++": ("torch.ones(2) + torch.ones(3)", "must match the size"),
}


@pytest.mark.parametrize(("code", "words"), FAILS.values(), ids=FAILS)
def test_what_fails_on_one_rank_ends_the_cell_on_all(session, code, words):
    with pytest.raises(RankError, match=words) as caught:
        session.run(f"if rank == 1:\n    {code}\ndist.barrier()", timeout_s=30)
    assert not isinstance(caught.value, RankDiedError)
    expect_healthy(session)


DIES = {
    "os._exit": ("import os; os._exit(7)", "exited with status 7"),
    "os.abort": ("import os; os.abort()", "killed by SIGABRT"),
    "a segmentation fault": ("import ctypes; ctypes.string_at(0)", "killed by SIGSEGV"),
    "all files closed": ("import os; os.closerange(3, 4096)", "killed by SIG|exited with status"),
}


@pytest.mark.parametrize(("code", "words"), DIES.values(), ids=DIES)
def test_what_destroys_a_rank_is_told_and_healed(session, code, words):
    session.run("kept = rank + 1")
    with pytest.raises(RankDiedError, match=words):
        session.run(f"if rank == 1:\n    {code}\ndist.barrier()", timeout_s=30)
    with pytest.raises(SessionBrokenError) as caught:
        session.run("1", ranks=1)
    assert "last words" not in str(caught.value), "they were told once"
    assert session.run("kept", ranks=0)[0].result == "1"
    session.ranks.heal(from_rank=0)
    expect_healthy(session)
    assert session.run("kept")[1].result == "1"


@pytest.mark.long
def test_two_hundred_megabytes_of_text(session):
    result = session.run("line = 'x' * 999_999\nfor _ in range(200): print(line)", quiet=True, timeout_s=60)
    assert result[0].stdout.startswith("... ") and len(result[0].stdout) < 7e6, "of a flood the end is kept"
    assert len(session.log(0)) <= 64 << 20
    expect_healthy(session)


def test_a_full_disk(make_session_alone):
    """This must be the last test, because it uses up the session of the module. No process can write, as on a full
    /tmp."""
    session = make_session_alone(2)
    _, hard = before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # the limit of the notebook process, which keeps the ranks' logs
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        result = session.run("print('shown all the same')", quiet=True)
        assert result[0].stdout == "shown all the same\n"
        expect_healthy(session)
        with pytest.raises(RankDiedError):
            session.run("import os\nif rank == 1: os._exit(1)\ndist.barrier()", quiet=True)
        session.ranks.heal()
        expect_healthy(session)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
