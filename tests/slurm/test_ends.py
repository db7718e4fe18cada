"""The end of a job with ranks: by Slurm, or with its notebook. A user's own allocation does not end."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

import ddp_notebook
from ddp_notebook.errors import RankError, SessionBrokenError
from tests.conftest import wait_until
from tests.test_preempt import LOOP
from tests.test_survive import SETUP

pytestmark = pytest.mark.alone  # changes links and addresses of the machine
_ROOT = Path(__file__).parents[2]
_GONE_S = 60.0  # longest time that a job outlives its notebook
_NOTEBOOK = """
import sys, time
import ddp_notebook
with ddp_notebook.start({start}) as session:
    session.run({code!r})
    {then}
"""
_SUM = "import os; x = torch.ones(1); dist.all_reduce(x); print(int(x), os.environ['SLURM_STEP_ID'])"


@contextmanager
def _notebook(start: str, code: str, then: str = "", before: tuple[str, ...] = ()):
    """Start a notebook process that runs a cell."""
    script = _NOTEBOOK.format(start=start, code=code, then=then or "pass")
    env = {**os.environ, "PYTHONPATH": str(_ROOT)}
    process = subprocess.Popen([*before, sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _tidy(slurm) -> None:
    """Remove files that a killed notebook could not remove."""
    for file in slurm.shared_folder.iterdir():
        assert file.stat().st_mode & 0o777 == 0o600 or file.suffix == ".out"
        file.unlink()
    for folder in Path(tempfile.gettempdir()).glob("ddp_notebook-*"):
        shutil.rmtree(folder)


def _by_a_job_that_goes_before(slurm, _):
    slurm.ask("sbatch", "-N2", "--exclusive", "-p", "urgent", "-o", "/dev/null", "--wrap=true")


def _by_the_limit(slurm, job):
    slurm.ask("scontrol", "update", f"jobid={job}", "endtime=now+1")


@pytest.mark.long
@pytest.mark.parametrize(
    ("end", "words"),
    [
        (_by_a_job_that_goes_before, "was preempted: a job with higher priority has taken its nodes"),
        (_by_the_limit, "has reached its time limit of .*; ask for more with -t"),
    ],
)
def test_what_ends_a_job_ends_the_cell_and_is_named(slurm, end, words):
    with ddp_notebook.start(2, slurm="-N2 --exclusive -t 10") as session:
        [job] = slurm.jobs()
        later = session.submit("import time\nwhile True: dist.all_reduce(torch.ones(1)); time.sleep(0.1)")
        end(slurm, job)
        with pytest.raises(SessionBrokenError, match=f"Slurm job {job} {words}"):
            later.result(timeout=60)


@pytest.mark.long
def test_a_job_ends_with_a_notebook_that_ends_without_a_word(slurm):
    script = "import ddp_notebook; ddp_notebook.start(1, slurm='-N1').run('print(rank)')"
    command = [sys.executable, "-c", script]
    env = {**os.environ, "PYTHONPATH": str(_ROOT)}
    assert subprocess.run(command, env=env, capture_output=True, text=True, timeout=60).stdout == "[0] 0\n"
    assert slurm.jobs() == []
    _tidy(slurm)


@pytest.mark.long
def test_a_job_ends_with_a_notebook_that_is_killed(slurm):
    cell = "import time\nprint('begun', flush=True)\nwhile True: dist.all_reduce(torch.ones(1)); time.sleep(0.1)"
    with _notebook("2, slurm='-N2 --exclusive'", cell) as notebook:
        assert "begun" in notebook.stdout.readline()
        assert len(slurm.jobs()) == 1
        notebook.kill()
        wait_until(lambda: not slurm.jobs(), _GONE_S)
    assert list(slurm.shared_folder.iterdir()) == [], "its guard has removed the job's output"
    _tidy(slurm)


@pytest.mark.long
def test_a_job_that_starts_after_its_notebook_ended_ends_at_once(slurm):
    with slurm.occupied() as other, _notebook("2, slurm='-N2 --exclusive'", "1") as notebook:
        wait_until(lambda: len(slurm.jobs()) == 2, 10.0)
        notebook.kill()
        notebook.wait()
        assert len(slurm.jobs()) == 2
        slurm.ask("scancel", other)
        began = time.monotonic()
        wait_until(lambda: not slurm.jobs(), _GONE_S)
        assert time.monotonic() - began < 15
    _tidy(slurm)


@pytest.mark.long
@pytest.mark.parametrize("asked", ["-N2 --exclusive", "-N2 -n4"])
def test_inside_an_allocation_there_is_no_queue_and_it_stays(slurm, asked):
    then = "session.stop(); import subprocess; print('left', subprocess.getoutput('squeue -h -o %D'))"
    with _notebook("4, slurm=''", _SUM, then, before=("salloc", "-Q", *asked.split())) as notebook:
        said, _ = notebook.communicate(timeout=60)
    assert said == "[0-3] 4 0\nleft 2\n"


@pytest.mark.long
def test_the_notebook_may_be_on_a_node_of_the_allocation(slurm, tmp_path):
    script = _NOTEBOOK.format(start="2, slurm=''", code=_SUM, then="import socket; print('on', socket.gethostname())")
    (tmp_path / "notebook.py").write_text(script)
    run = f"--wrap=PYTHONPATH={_ROOT} {sys.executable} {tmp_path}/notebook.py"
    slurm.ask("sbatch", "-N2", "--exclusive", "-o", str(tmp_path / "said"), run)
    wait_until(lambda: not slurm.jobs(), 60.0)
    assert (tmp_path / "said").read_text() == "[0-1] 2 0\non n1\n"


@pytest.mark.long
@pytest.mark.parametrize("end", [_by_a_job_that_goes_before, _by_the_limit])
def test_tasks_that_were_warned_remove_what_they_have_written(slurm, tmp_path, end):
    """They ignore SIGTERM while ranks save their state. SIGKILL would leave their folders."""
    folders = Path(tempfile.gettempdir()).glob
    before = set(folders("ddp_notebook-*"))
    with ddp_notebook.start(2, slurm="-N2 --exclusive -t 10", on_preempt=str(tmp_path)) as session:
        [job] = slurm.jobs()
        said = session.run("import os; print(os.environ['TMPDIR'])")[1].stdout.strip()
        assert said == tempfile.gettempdir(), "which the tasks share with the notebook"
        later = session.submit("import time; time.sleep(100)", quiet=True)
        end(slurm, job)
        with pytest.raises(SessionBrokenError, match=f"Slurm job {job} "):
            later.result(timeout=60)
    assert set(folders("ddp_notebook-*")) == before


def _by_signal(slurm, job):
    """Send the signal of `--signal=USR1@60` 60 s before the end."""
    slurm.ask("scancel", "--signal=USR1", job)


@pytest.mark.long
@pytest.mark.parametrize(
    "warn",
    [
        _by_signal,
        pytest.param(_by_a_job_that_goes_before, marks=pytest.mark.long),
        pytest.param(_by_the_limit, marks=pytest.mark.long),
    ],
)
def test_what_says_that_the_time_is_nearly_over_has_loops_save(slurm, tmp_path, warn):
    with ddp_notebook.start(2, slurm="-N2 --exclusive -t 10", on_preempt=str(tmp_path)) as session:
        [job] = slurm.jobs()
        session.run(SETUP, quiet=True)
        begun = tmp_path / "begun"
        loop = LOOP.format(folder="", pause=0).replace("train()", f"train(); pathlib.Path({str(begun)!r}).touch()")
        loop = loop.replace("steps=20", "steps=1000")  # Slurm checks limits twice a minute
        later = session.submit(loop, quiet=True)
        wait_until(begun.exists, 20.0, "a step")
        warn(slurm, job)
        with pytest.raises(RankError, match=rf"saved their state before step \d+ to {tmp_path}/step-\d+\."):
            later.result(timeout=60)
        if warn is _by_signal:
            assert session.run("dist.barrier(); 1", quiet=True)[1].result == "1"
