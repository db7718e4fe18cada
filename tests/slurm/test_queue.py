"""A start that waits in Slurm's queue, and one that Slurm rejects. No rank is started."""

from __future__ import annotations

import os
import re
import signal
import threading
import time

import pytest

import ddp_notebook
from ddp_notebook.errors import StartError, UsageError
from ddp_notebook.launch.starters import slurm as starters
from ddp_notebook.launch.starters.slurm_queue import SlurmJob, SlurmJobState
from tests.conftest import wait_until

pytestmark = pytest.mark.alone  # changes links and addresses of the machine


def test_the_queue_state_is_shown_and_a_stop_cancels_the_job(slurm):
    said = []

    def report(line: str) -> None:
        said.append(line)
        if "Resources" in line or "Priority" in line:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()

    with slurm.occupied() as other:
        with pytest.raises(
            KeyboardInterrupt, match="the start was interrupted: all processes that it started have ended"
        ):
            ddp_notebook.start(slurm="-N1 --exclusive -t 1", report=report)
        assert slurm.jobs() == [other]
    assert re.fullmatch(r"Slurm job \d+ waits in the queue: (Resources|Priority)(, starts about .*)?", said[-1])
    assert ddp_notebook.current() is None


@pytest.mark.long
def test_waiting_in_the_queue_does_not_count_as_the_start(slurm):
    """The time limit starts with the job. (Its tasks cannot connect: they start with another Python.)"""
    with slurm.occupied() as other:
        threading.Timer(2.0, slurm.ask, ("scancel", other)).start()
        with pytest.raises(StartError, match=r"no task connected to the notebook: Slurm job \d+ has ended"):
            ddp_notebook.start(slurm=ddp_notebook.Slurm("-N1 --exclusive", python="true"), timeout_s=1.0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("-p nowhere", "sbatch refuses: invalid partition specified: nowhere; Batch job submission failed"),
        ("--frobnicate", "sbatch refuses: unrecognized option '--frobnicate'"),
        ("-t soon", "sbatch refuses: Invalid --time specification"),
        (
            "-N9",
            "will not start: no node of the partition has the requested resources (PartitionConfig); it was removed",
        ),
        (
            "-n900",
            "will not start: no node of the partition has the requested resources (PartitionConfig); it was removed",
        ),
    ],
)
def test_what_slurm_refuses_is_told_in_its_own_words(slurm, arguments, words):
    with pytest.raises(StartError, match=re.escape(words)):
        ddp_notebook.start(slurm=arguments)
    assert slurm.jobs() == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "--slurm without arguments needs a notebook inside an allocation, but SLURM_JOB_ID is not set"),
        ("-N1 'x", '--slurm: No closing quotation: "-N1 \'x"'),
        (
            "-N1 --array=1-4",
            "--slurm takes no --array=1-4: a job array starts several jobs, and a session needs one; leave it out",
        ),
        ("-N1 -W", "--slurm takes no -W: sbatch would wait for the end of the job; leave it out"),
    ],
)
def test_arguments_that_cannot_be(slurm, arguments, words):
    with pytest.raises(UsageError, match=re.escape(words)):
        ddp_notebook.start(slurm=arguments)


def test_a_job_whose_tasks_cannot_start_shows_its_last_output(slurm):
    with pytest.raises(
        StartError, match=r"no task connected to .*: Slurm job \d+ has failed; its last words:\n(?s:.*)/no/python"
    ):
        ddp_notebook.start(slurm=ddp_notebook.Slurm("-N2", python="/no/python"))
    assert slurm.jobs() == []


def test_a_job_whose_output_its_nodes_cannot_write(slurm):
    with pytest.raises(
        StartError, match=r"has failed; its output, /no/such/folder/said, cannot be read here: pass a file"
    ):
        ddp_notebook.start(slurm="-N1 -o /no/such/folder/said")


@pytest.mark.long
def test_a_job_that_is_cancelled_while_it_waits(slurm):
    def report(line: str) -> None:
        if "waits in the queue: " in line:
            [job] = set(slurm.jobs()) - {other}
            threading.Timer(0.1, slurm.ask, ("scancel", job)).start()

    words = r"Slurm job \d+ was cancelled, by scancel or by an administrator"
    with slurm.occupied() as other, pytest.raises(StartError, match=words):
        ddp_notebook.start(slurm="-N1", report=report)


@pytest.mark.long
def test_a_job_that_is_cancelled_while_its_tasks_begin(slurm, tmp_path):
    """Their start takes long, because the queue is polled rarely."""
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)

    def report(line: str) -> None:
        if "runs on" in line:
            slurm.ask("scancel", *slurm.jobs())

    with pytest.raises(StartError, match=r"Slurm job \d+ was cancelled, by scancel or by an administrator"):
        ddp_notebook.start(slurm=ddp_notebook.Slurm("-N2", python=str(slow)), report=report)


@pytest.mark.long
def test_more_ranks_than_tasks_can_have(slurm):
    with pytest.raises(UsageError, match=re.escape("3 ranks do not divide among n1, n2 as asked; N is the sum of all")):
        ddp_notebook.start(3, slurm="-N2")
    assert slurm.jobs() == []


def test_without_slurm(monkeypatch):
    monkeypatch.setenv("PATH", "/no/such/folder")
    with pytest.raises(
        StartError, match="sbatch was not found, and --slurm needs Slurm's commands: run the notebook on a login node"
    ):
        ddp_notebook.start(slurm="-N2")


def test_without_a_cluster(slurm, monkeypatch):
    monkeypatch.delenv("SLURM_CONF")
    with pytest.raises(StartError, match=r"finds no cluster: this machine has no slurm\.conf; run the notebook on"):
        ddp_notebook.start(slurm="-N2")


def test_the_script_is_shown_and_tried_out(slurm):
    said = starters.starter("-N2 -t 5").preview()
    assert said.startswith("sbatch -N2 -t 5 would be given\n\n#!/bin/sh\n#SBATCH --job-name=ddp_notebook\n")
    assert (
        "exec srun $tasks" in said
        and "outpost --file INVITATION\n" in said
        and re.search(r"\nsbatch: Job \d+ to start at \d+-\d+-\d+T[\d:]+ using .* on nodes n\[1-2\]", said)
    )
    with pytest.raises(StartError, match=r"sbatch refuses: .*Requested node configuration is not available"):
        starters.starter("-N9").preview()
    assert slurm.jobs() == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("-N2", {"0/2", "1/2"}),
        pytest.param("-N2 --exclusive", {"0/2", "1/2"}, marks=pytest.mark.long),
        pytest.param("-N2 -c2", {"0/2", "1/2"}, marks=pytest.mark.long),
        pytest.param("-n3", {"0/3", "1/3", "2/3"}, marks=pytest.mark.long),
        ("-N2 --ntasks-per-node=2", {"0/4", "1/4", "2/4", "3/4"}),
        pytest.param("-n2 -c2 --export=NONE", {"0/2", "1/2"}, marks=pytest.mark.long),
    ],
)
def test_arguments_set_the_number_of_tasks_or_one_task_per_node(slurm, tmp_path, arguments, said):
    begun = starters.starter(f"{arguments} -o {tmp_path}/said")
    try:
        begun.start(["sh", "-c", "echo $SLURM_PROCID/$SLURM_NTASKS"], {})
        wait_until(lambda: begun.trouble(now=True), 10.0)
        assert begun.trouble().startswith(f"{begun.words} has ended; its last words:\n")
        assert set(re.findall(r"\d/\d", (tmp_path / "said").read_text())) == said
    finally:
        begun.end()
    assert (tmp_path / "said").exists()  # it belongs to the user


@pytest.mark.long
def test_a_line_tells_that_the_end_is_near(slurm):
    begun = starters.Submitted(["-N1", "-t", "1"], notice_s=(59.9, 58.5))
    said: list[str] = []

    def told() -> int:
        said.extend(begun.notices())
        return len(said)

    try:
        begun.start(["sleep", "60"], {})
        wait_until(lambda: told() == 2, 15.0)
        assert re.fullmatch(r"Slurm job \d+ ends in (59|60) s, and all ranks with it: save your data now", said[0])
        assert re.fullmatch(r"Slurm job \d+ ends in 5[78] s, and all ranks with it: save your data now", said[1])
    finally:
        begun.end()


@pytest.mark.long
def test_a_controller_that_does_not_answer_ends_nothing(slurm, monkeypatch):
    begun = starters.starter("-N1")
    begun.start(["sleep", "60"], {})
    try:
        wait_until(lambda: "runs on" in begun.state(), 10.0)
        with monkeypatch.context() as patch:
            patch.setenv("PATH", "/no/such/folder")
            assert begun.trouble(now=True) == ""
            assert "there is no squeue on this machine" in begun.state()
    finally:
        begun.end()


NOW = time.mktime((2020, 11, 24, 12, 0, 0, 0, 0, -1))


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (SlurmJobState(state="PENDING"), "waits in the queue"),
        (
            SlurmJobState(state="PENDING", reason="Priority", starts=NOW),
            "waits in the queue: Priority, starts about Tue 24 Nov, 12:00",
        ),
        (SlurmJobState(state="CONFIGURING"), "has nodes, which are being prepared"),
        (SlurmJobState(state="RUNNING", nodes="n[1-2]"), "runs on n[1-2]"),
        (
            SlurmJobState(state="TIMEOUT", limit="2:00:00"),
            "has reached its time limit of 2:00:00; ask for more with -t",
        ),
        (SlurmJobState(state="NODE_FAIL"), "has lost a node that failed"),
        (SlurmJobState(state="OUT_OF_MEMORY"), "has used more memory than it had; ask for more with --mem"),
        (SlurmJobState(state=""), "is no longer known to Slurm"),
        (SlurmJobState(state="REVOKED"), "has ended: REVOKED"),
    ],
)
def test_states_in_words(seen, words):
    assert seen.in_words() == words


def test_a_job_that_slurm_has_forgotten(slurm):
    assert SlurmJob("999999").state() == SlurmJobState(state="")
    SlurmJob("999999").cancel()
