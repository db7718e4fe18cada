"""Injected faults: the effect of `%ddp_fault` on a rank, and of a stop after it."""

from __future__ import annotations

import re
import time

import pytest

from ddp_notebook.errors import CellTimeoutError, RankDiedError, RankError, SessionBrokenError, UsageError

LOOP = "import time\nfor n in range(2000): time.sleep(0.005)"
STEPS = """
import time
w = torch.nn.Parameter(torch.zeros(2)); opt = torch.optim.SGD([w], 0.1)
def took_s(step):
    began = time.monotonic()
    step()
    return time.monotonic() - began
def step(): w.grad = torch.ones(2); opt.step()
def reduce(): dist.all_reduce(torch.ones(1), async_op=True).wait()
"""


def test_one_that_raises(session):
    session.run("kept = rank")
    said = session.ranks.fault("raise", 1, after_s=0.1)
    assert said == "rank 1 will raise an error: 0.1 s into the cell that runs, or the next one"
    with pytest.raises(RankError, match=r"InjectedFaultError: rank 1 fails: %ddp_fault injected this error \(rank 1\)"):
        session.run(f"{LOOP}\ndist.barrier()", timeout_s=20)
    assert session.run("kept")[1].result == "1"
    session.run(LOOP[: LOOP.index("2000")] + "20): time.sleep(0.005)")  # the fault happens once


def test_one_that_hangs_until_its_time_is_up(session):
    session.ranks.fault("hang", 0)
    with pytest.raises(CellTimeoutError, match=r"rank 0: running, at cell line 2(.|\n)*rank 1: waits in barrier|rank"):
        session.run(f"{LOOP}\ndist.barrier()", timeout_s=1)
    assert session.run("x = torch.ones(1); dist.all_reduce(x); int(x)")[0].result == "2"


def test_a_slow_one_and_off(session):
    session.run(STEPS)
    assert "longer for each step and each collective until %ddp_fault off" in session.ranks.fault("slow", 1, by_s=1.0)
    result = session.run("import time; time.sleep(0.1); took_s(step), took_s(reduce)")
    of_0, of_1 = (eval(result[rank].result) for rank in (0, 1))
    assert of_0[0] < 0.9 and min(of_1) > 1.0
    assert of_0[1] > 0.5  # it waits for the slow rank
    assert session.ranks.fault("off") == "no more faults on ranks 0,1"
    assert max(eval(session.run("took_s(step), took_s(reduce)")[1].result)) < 0.9


def test_what_was_asked_for_is_forgotten(session):
    session.ranks.fault("kill", 1, after_s=0.0)
    session.ranks.fault("off", 1)
    session.run("import time; time.sleep(0.2)")


@pytest.mark.parametrize("kind", ["kill", "raise"])
def test_a_fault_after_the_end_of_its_cell_does_not_happen(session, capsys, kind):
    before = session.ranks.pids()
    session.ranks.fault(kind, 1, after_s=2.0)
    session.run("x = 1")
    said = f"[1] %ddp_fault {kind} 2 s into it: the cell ended first, and the fault did not happen"
    assert said in capsys.readouterr().err
    session.run("import time; time.sleep(2.2)")  # the fault would happen now
    assert session.ranks.pids() == before


def test_a_cell_that_ends_before_and_has_closed_stderr(session):
    session.ranks.fault("raise", 1, after_s=60)
    assert session.run("import sys; sys.stderr.close()", quiet=True)[1].status == "ok"


def test_at_once_however_short_the_cell_is(session):
    session.ranks.fault("raise", 1)
    with pytest.raises(RankError, match=r"InjectedFaultError") as raised:
        session.run("1 + 1", timeout_s=20)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(raised.value.tracebacks[1]))
    assert re.search(r"\n-+> 1 1 ?\+ ?1\n", plain), plain
    session.run("1 + 1")


def test_in_a_cell_that_runs(session):
    later = session.submit(LOOP)
    began = time.monotonic()
    session.ranks.fault("raise", 0)
    with pytest.raises(RankError, match="InjectedFaultError"):
        later.result(timeout=10)
    assert time.monotonic() - began < 6  # the other rank has a grace period


def test_what_cannot_be(session):
    for arguments, words in {
        ("melt", 0): "the fault must be one of kill, hang, slow, raise, off, got 'melt'",
        ("kill",): "kill needs the ranks",
        ("hang", 7): "rank",
    }.items():
        with pytest.raises(UsageError, match=words):
            session.ranks.fault(*arguments)
    with pytest.raises(UsageError, match=r"--after must be 0 to 3600 seconds, got -1"):
        session.ranks.fault("kill", 0, after_s=-1)


def test_one_that_is_killed_in_a_cell_and_between_two(session):
    session.ranks.fault("kill", 1, after_s=0.1)
    with pytest.raises(RankDiedError, match="SIGKILL"):
        session.run(f"{LOOP}\ndist.barrier()", timeout_s=20)
    with pytest.raises(SessionBrokenError, match="rank 1 died"):
        session.ranks.fault("hang", 1)
    session.ranks.heal()
    assert session.ranks.fault("kill", 0) == "rank 0 was killed"
    assert "rank 0 died" in repr(session) or "0 died" in repr(session)
    assert session.ranks.heal()[0].startswith("rank 0 was replaced")
