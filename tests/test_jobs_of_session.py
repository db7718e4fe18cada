"""Background cells of a program: `session.submit` and `session.jobs`."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddp_notebook.errors import JobCancelledError, RankDiedError, RankError, UsageError
from tests.conftest import wait_until

ROOT = Path(__file__).parents[1]
SLEEP = "import time; time.sleep(60)"


def test_a_job_is_a_future_whose_output_is_shown(session, capsys):
    job = session.submit("print('hello'); rank")
    assert job.result(10)[1].result == "1"
    assert (job.state, job.done(), job.ranks) == ("done", True, [0, 1])
    assert capsys.readouterr().out == "[0-1] hello\n[0] 0\n[1] 1\n"
    assert session.submit("print('hello')", quiet=True).result(10).ok
    assert capsys.readouterr() == ("", "")


def test_whoever_awaits_a_job_may_be_stopped_alone(session):
    job = session.submit("import time; time.sleep(0.5); rank", quiet=True)

    async def wait() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.ensure_future(_of(job)), 0.1)
        assert (await job)[0].result == "0"

    asyncio.run(wait())


async def _of(job):
    return await job


def test_mistakes_are_told_at_once_and_not_by_the_job(session):
    with pytest.raises(UsageError, match="7"):
        session.submit("1", ranks=7)
    with pytest.raises(UsageError, match="timeout must be a positive number of seconds"):
        session.submit("1", timeout_s=0)
    with pytest.raises(UsageError, match=r"job 99999 does not exist; "):
        session.jobs[99999]


def test_the_wait_raises_what_the_first_that_failed_has_raised(session):
    session.jobs.wait()
    jobs = [session.submit(code, quiet=True) for code in ("1/0", "rank", "[][1]")]
    told: list[str] = []
    with pytest.raises(RankError, match="ZeroDivisionError"):
        session.jobs.wait(report=lambda job: told.append(job.state))
    assert told == ["failed", "done", "failed"]
    with pytest.raises(RankError, match="IndexError"):
        jobs[2].result()
    assert session.jobs.wait() == [], "each is told of once"


def test_what_a_script_is_told_of_a_failure_is_plain_text(session, capsys):
    job = session.submit("1/0")
    with pytest.raises(RankError):
        session.jobs.wait(job.number)
    told = ""

    def is_told() -> bool:
        nonlocal told
        told += capsys.readouterr().err
        return "RankError: ZeroDivisionError" in told

    wait_until(is_told)
    assert "----> 1 1/0" in told and "\x1b" not in told


def test_one_that_waits_is_cancelled_without_having_begun(session):
    first = session.submit(SLEEP, quiet=True)
    second = session.submit("began = True", quiet=True)
    third = session.submit("rank", quiet=True)
    assert repr(third) == f"job {third.number} waits for jobs {first.number} and {second.number}"
    assert second.cancel() and not first.done()
    with pytest.raises(JobCancelledError, match=f"job {second.number} was cancelled after 0.0 s"):
        second.result(5)
    wait_until(lambda: first.state == "running")
    assert session.jobs.cancel(first.number) == [repr(first)]
    with pytest.raises(JobCancelledError, match=r"(?s)was cancelled after .*interrupted at (cell line 1|the start)"):
        first.result(5)
    assert third.result(10)[0].result == "0"
    assert session.run("'began' in globals()")[0].result == "False"
    assert not third.cancel(), "it has ended"


def test_one_that_is_cancelled_as_it_begins_ends(session):
    for _ in range(20):
        job = session.submit(SLEEP, quiet=True)
        session.jobs.cancel(job.number)
        wait_until(job.done)
        assert job.state == "cancelled"
    assert session.run("x = torch.ones(1); dist.all_reduce(x); int(x)")[0].result == "2"


def test_an_interrupt_ends_one_as_soon_as_it_runs(session):
    for _ in range(20):
        job = session.submit("while True: pass")
        wait_until(lambda job=job: job.state == "running", 20)
        assert session.interrupt()[0] == f"job {job.number} was ended on ranks 0,1; all variables are kept"
        wait_until(lambda job=job: job.state == "cancelled", 20)


def test_an_interrupt_after_the_code_of_a_cell_keeps_builtins(session, capfd):
    """IPython changes `builtins` for each cell, and an interrupt can arrive before it has restored them."""
    session.run("import builtins, IPython.core.builtin_trap as trap\nbefore = {*vars(builtins)}", quiet=True)
    session.run(
        "leave = trap.BuiltinTrap.__exit__\n"
        "def interrupted(self, *error):\n"
        "    trap.BuiltinTrap.__exit__ = leave\n"
        "    raise KeyboardInterrupt\n"
        "trap.BuiltinTrap.__exit__ = interrupted",
        quiet=True,
    )
    with pytest.raises(RankError, match="KeyboardInterrupt"):  # `with` has looked it up at the start of this cell
        session.run("1", quiet=True)
    kept = session.run("{*vars(builtins)} == before", quiet=True)
    assert {kept[rank].result for rank in (0, 1)} == {"True"}
    told = capfd.readouterr()
    assert "builtins" not in told.out + told.err


def test_only_the_last_jobs_are_kept(session):
    jobs = [session.submit("1", quiet=True) for _ in range(30)]
    assert all(job.result(20).ok for job in jobs)
    session.submit("1", quiet=True).result(10)
    assert len(session.jobs) == 21 and jobs[0] not in list(session.jobs)


def test_a_timeout_counts_from_its_turn(session):
    first = session.submit("import time; time.sleep(0.6)", quiet=True)
    second = session.submit("rank", timeout_s=0.4, quiet=True)
    assert first.result(10).ok and second.result(10).ok


def test_a_dead_rank_ends_its_job_and_others_run_the_next_job(session):
    job = session.submit("dist.barrier()\nimport time; time.sleep(60)", quiet=True)
    after = session.submit("rank", quiet=True)
    wait_until(lambda: job.state == "running")
    os.kill(session.ranks.pids()[1], signal.SIGKILL)
    with pytest.raises(RankDiedError):
        job.result(10)
    assert after.result(10).ranks == [0]
    assert session.ranks.heal()[0].startswith("rank 1 was replaced")


def test_with_heal_the_next_job_begins_with_it(make_session_alone):
    session = make_session_alone(2, heal=True)
    job = session.submit("import os, time\nif rank: os._exit(3)\ntime.sleep(60)", quiet=True)
    after = session.submit("rank", quiet=True)
    with pytest.raises(RankDiedError):
        job.result(20)
    assert after.result(20).ranks == [0, 1]


def test_the_end_of_the_session_cancels_what_runs_and_what_waits(make_session_alone, capsys):
    """After the tests with the module's session."""
    session = make_session_alone(2)
    jobs = [session.submit(SLEEP) for _ in range(2)]
    wait_until(lambda: jobs[0].state == "running")
    session.stop()
    for job in jobs:
        with pytest.raises(JobCancelledError, match=r"was cancelled after \d\.\d s: the session was stopped"):
            job.result(0)
    assert capsys.readouterr().err.count("the session was stopped") == 2


@pytest.mark.long
@pytest.mark.parametrize("is_deaf", [False, pytest.param(True, marks=pytest.mark.long)])
def test_the_end_of_the_program_cancels_with_a_sentence(is_deaf):
    code = "sum(range(10**11))" if is_deaf else "import time\ntime.sleep(60)"
    script = (
        f"import ddp_notebook\nsession = ddp_notebook.start(2)\njob = session.submit({code!r})\n"
        "import time\nwhile job.state == 'waiting': time.sleep(0.01)\ntime.sleep(0.2)\nprint('last')"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "last\n"), done
    assert time.monotonic() - began < 30
    assert "job 1 was cancelled after" in done.stderr and ": the program has ended" in done.stderr
