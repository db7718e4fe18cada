"""Jobs of torchrun that a notebook observes. The script sees no difference when a notebook attaches, detaches or
hangs."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from typing import Any, cast

import psutil
import pytest

from ddp_notebook.errors import UsageError
from ddp_notebook.messages.encoding import VERSION
from ddp_notebook.messages.ranks import CellDone
from ddp_notebook.registry import entries, lookup
from ddp_notebook.registry.torchrun import place
from ddp_notebook.run.rank_requests import Questions
from ddp_notebook.torchrun.job import TorchrunJob, status_of
from ddp_notebook.torchrun.member import Member, RefusedError, place_of
from ddp_notebook.torchrun.monitor_source import JobProbe
from ddp_notebook.torchrun.rounds import Round
from ddp_notebook.widgets import Monitor
from tests.conftest import wait_until
from tests.torchrun.conftest import WAITS

_GOES_ON = """
wait_for('go')
train(20)
sys.stdout.write(f"done {rank} {sys.argv[1:]} {sys.path[0]} {__name__}\\n")
"""


@pytest.mark.long
def test_a_job_is_seen_recorded_and_reported(jobs):
    process = jobs.start(_GOES_ON)
    job = jobs.attach()
    wait_until(lambda: "at train.py:" in (told := repr(job.status())) and told.count("in wait_for") == 2, 20.0)
    assert job.interrupt() == ["ranks 0,1: in no operation, so nothing was aborted"]
    monitor = Monitor(job)
    jobs.touch("go")
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 0, text
    assert all(f"done {rank} ['--lr', '1'] {jobs.folder} __main__" in text for rank in (0, 1))
    job.settle(10.0)
    recording = job.recording
    assert [len(recording.metrics["loss"].of_rank(rank)[0]) for rank in (0, 1)] == [20, 20]
    assert recording.collectives(op="all_reduce")[-1].site.startswith("train.py:")
    assert job.report().steps == 18 and recording.dropped == {}
    assert repr(job.status()).count("ended the script") == 2
    monitor.close()


@pytest.mark.long
def test_a_hang_is_explained_and_cut(jobs):
    body = """
for attempt in range(2):
    try:
        if rank == 0:
            dist.all_reduce(torch.ones(3))
        else:
            dist.broadcast(torch.ones(3), 0)
    except RuntimeError as error:
        sys.stdout.write(f"caught {type(error).__name__}\\n")
        break
dist.destroy_process_group()
dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/again", rank=rank, world_size=2)
dist.barrier()
sys.stdout.write("on again\\n")
"""
    process = jobs.start(body)
    job = jobs.attach()
    wait_until(lambda: len([one for one in job.inspect().values() if one.state == "waiting"]) == 2, 20)
    assert job.status().why == "rank 0 is in all_reduce #1, rank 1 is in broadcast #1 of group default"
    said = job.interrupt()
    assert "#1 of group default (train.py:" in said[0]
    assert said[0].endswith("was aborted and raised an error, as if a peer had ended"), said
    assert all("was aborted and raised" in one or "had left it before, by itself or" in one for one in said), said
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 0, text
    assert text.count("caught RuntimeError") == 2 and text.count("on again") == 2, "a script that handles it goes on"
    assert "has aborted" in text and "#1 of group default (train.py:" in text


@pytest.mark.long
def test_the_notebook_goes_and_another_comes(jobs):
    """The second notebook also gets data that was sent before it attached: texts and models."""
    process = jobs.start("train(5)\nwait_for('first')\ntrain(5)\n" + _GOES_ON)
    job = jobs.attach()
    with pytest.raises(RefusedError, match=r"process \d+ is attached to it.*%ddp_attach train-.* --take-over"):
        jobs.attach()
    jobs.touch("first")
    wait_until(lambda: "loss" in job.recording.metrics, 20)
    second = jobs.attach(take_over=True)
    wait_until(lambda: not job.is_running, 10)
    assert any("is attached to it now" in line for line in job.events.last(9)), job.events.last(9)
    second.close()
    third = jobs.attach()
    jobs.touch("go")
    assert process.wait(60) == 0
    third.settle(10.0)
    assert third.recording.collectives(op="all_reduce")[0].site.startswith("train.py:")
    assert len(third.recording.layouts) >= 2


@pytest.mark.long
def test_a_notebook_that_is_killed_or_stopped_harms_nobody(jobs):
    process = jobs.start("wait_for('go')\ntrain(2000)\nsys.stdout.write('took\\n')\n")
    wait_until(lambda: len(jobs.ranks()) == 2, 60)
    code = (
        "from ddp_notebook import attached_job\njob = attached_job.attach_job()\n"
        "with job.changed: job.changed.wait_for(lambda: job.round.there == [0, 1])\nprint('in', flush=True)\ninput()"
    )
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None and other.stdout.readline() == "in\n"
        jobs.touch("go")
        other.send_signal(signal.SIGSTOP)  # the process exists but receives no more data
        text, _ = process.communicate(timeout=100)
    finally:
        other.kill()
        other.communicate()
    assert process.returncode == 0 and text.count("took") == 2, text


@pytest.mark.long
def test_which_job(jobs):
    jobs.start("", name="one.py", head=WAITS)
    jobs.start("", name="two.py", head=WAITS)
    wait_until(lambda: sorted(len(one.entries) for one in lookup.everything()) == [2, 2], 60)
    with pytest.raises(UsageError, match=r"several are running; choose one:\n  %ddp_attach") as raised:
        lookup.find()
    assert ("one.py --lr 1, 2 ranks" in str(raised.value), "two.py --lr 1, 2 ranks" in str(raised.value)) == (
        True,
        True,
    )
    assert lookup.find("two").name.startswith("two-")
    with pytest.raises(UsageError, match=r"cannot attach to 'three': .*; running are (one|two)-"):
        lookup.find("three")


def test_none_is_there(jobs):
    with pytest.raises(UsageError, match=r"nothing to attach to; %ddp_start 4 --keep .*, torchrun .* a job"):
        lookup.find()


@pytest.mark.long
def test_a_restart_is_one_more_attempt_of_the_same_job(jobs, monkeypatch):
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    body = """
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    wait_for("go")
    if rank == 1:
        raise ValueError("bad batch")
    wait_for("never")
train(8)
"""
    process = jobs.start(body, "--max-restarts=1")
    job = jobs.attach()
    jobs.touch("go")
    text, _ = process.communicate(timeout=100)
    assert process.returncode == 0, text
    job.settle(10.0)
    assert job.round is not None and job.round.number == 2
    assert job.report().cell == 2 and len(job.recordings) == 1
    assert any("rank 1: ValueError: bad batch, at train.py:" in line for line in job.events.last(9)), job.events.last(9)


def test_with_a_shared_store_the_fault_is_explained(monkeypatch):
    """The variables are those that torchrun gives its ranks. The job has one rank and can be restarted."""
    given = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "1", "TORCHELASTIC_RUN_ID": "7"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)

    def said() -> str:
        entry = entries.enter(lookup.TORCHRUN, "train-1", place("train.py", [], "train-1", VERSION).to_json())
        member = Member(entry=entry, place=place_of(entry))
        entry.remove()
        run = Round(number=1, world_size=1, observer=cast(Any, None), members={0: member})
        views = JobProbe(Questions(lambda *_: None, lambda _: None)).views(run, {}, {})
        return repr(status_of("train-1", run, views, []))

    monkeypatch.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", raising=False)
    assert "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where torchrun is started" in said()
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    assert "TORCH_DISABLE" not in said() and "its start, without torch so far" in said()
    assert said().startswith("job train-1, attempt 1 seen by this notebook\n")


def test_a_failed_job_lists_ranks_with_errors_of_their_own_first(monkeypatch):
    """The next ones are ranks that may have been ended by a signal, which torchrun sends to all others. Last are the
    ranks that waited for the failed ones."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    in_all_reduce = {"op": "all_reduce"}
    ends = [
        CellDone(cell=1, status="ok", duration_s=1.0),
        CellDone(
            cell=1, status="error", duration_s=1.0, ename="RuntimeError", evalue="closed", operation=in_all_reduce
        ),
        None,
        CellDone(cell=1, status="error", duration_s=1.0, ename="ValueError", evalue="bad", place="train.py:3"),
    ]
    entry = entries.enter(lookup.TORCHRUN, "train-1", place("train.py", [], "train-1", VERSION).to_json())
    entry.remove()
    run = Round(number=1, world_size=4, observer=cast(Any, None))
    for rank, end in enumerate(ends):
        run.members[rank] = member = Member(entry=entry, place=place_of(entry), done=end)
        member.line, other = socket.socketpair()
        other.close()
        member.go()
    assert run.how_it_ended == (
        "rank 3: ValueError: bad, at train.py:3; rank 2: its process ended without a message, for example by a signal; "
        "rank 1: RuntimeError: closed; rank 0: ended the script"
    )


@pytest.mark.processes
def test_a_script_that_imports_no_torch(jobs):
    path = jobs.folder / "plain.py"
    path.write_text(
        "import os, sys, time\nwhile not os.path.exists('go'): time.sleep(0.01)\nprint('torch' in sys.modules)"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "ddp_notebook.attach", "--name", "plain", str(path)],
        cwd=jobs.folder,
        stdout=subprocess.PIPE,
        text=True,
    )
    wait_until(lookup.everything, 20)
    found = lookup.find("plain")
    job = TorchrunJob(found.key, found.name)
    assert "its start, without torch so far" in repr(job.status())
    jobs.touch("go")
    text, _ = process.communicate(timeout=20)
    assert (process.returncode, text) == (0, "False\n")
    job.close()


@pytest.mark.long
def test_a_rank_that_does_not_answer_is_asked_again(jobs):
    path = jobs.script("import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)", head="")
    with subprocess.Popen([sys.executable, "-m", "ddp_notebook.attach", str(path)], cwd=jobs.folder) as process:
        try:
            wait_until(lookup.everything, 20)
            process.send_signal(signal.SIGSTOP)
            wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, 20, "it is stopped")
            found = lookup.find()
            job = TorchrunJob(found.key, found.name)
            assert job.world_size == 0 and "does not answer on its socket" in job.events.last(1)[0]
            process.send_signal(signal.SIGCONT)
            wait_until(lambda: job.round is not None and job.round.living == [0], 20, "it has let this one in")
            job.close()
        finally:
            process.send_signal(signal.SIGCONT)
            jobs.touch("go")
    assert process.returncode == 0


@pytest.mark.processes
def test_a_script_whose_rank_cannot_be_entered_runs_all_the_same(jobs):
    (jobs.folder / "run" / "ddp_notebook").mkdir(mode=0o755)
    path = jobs.folder / "plain.py"
    path.write_text("print('ran')")
    ran = subprocess.run([sys.executable, "-m", "ddp_notebook.attach", str(path)], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, "ran\n")
    assert ran.stderr.startswith("ddp_notebook: no notebook can attach to rank 0:") and "chmod 700" in ran.stderr


@pytest.mark.processes
def test_an_error_has_no_frames_of_ours(jobs):
    path = jobs.folder / "plain.py"
    path.write_text("def fail():\n    raise ValueError('no')\nfail()\n")
    bare = subprocess.run([sys.executable, str(path)], capture_output=True, text=True)
    ours = subprocess.run([sys.executable, "-m", "ddp_notebook.attach", str(path)], capture_output=True, text=True)
    assert (ours.returncode, ours.stderr) == (bare.returncode, bare.stderr)


@pytest.mark.long
def test_a_worker_that_the_script_forks_does_not_hold_the_door(jobs):
    jobs.start("if os.fork() == 0:\n    wait_for('end')\n    os._exit(0)\nwait_for('go')\nos._exit(0)")
    job = jobs.attach()
    jobs.touch("go")
    wait_until(lambda: not job.is_running, 20, "the ranks have ended, though their children have not")


@pytest.mark.long
@pytest.mark.parametrize("call", ["breakpoint()", "import pdb; pdb.set_trace()", "dist.breakpoint()"])
def test_a_breakpoint_without_a_terminal_names_the_remedy(jobs, call):
    process = jobs.start(f"\nos.close(0)\n{call}\nprint('went on')\n")
    text, _ = process.communicate(timeout=60)
    assert process.returncode != 0 and "went on" not in text
    assert "RuntimeError: breakpoint() reads its commands from a terminal, and this rank has none" in text
