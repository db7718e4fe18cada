"""`%ddp_torchrun`: the options of its line, and that no part of a job survives its notebook."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import subprocess
import sys
import threading
import time

import psutil
import pytest

from ddp_notebook import attached_job
from ddp_notebook.errors import JobFailedError, UsageError
from ddp_notebook.registry.torchrun import OUTPUT_VARIABLE, launcher
from ddp_notebook.run.cells.cell import OutputItem
from ddp_notebook.run.cells.interrupt import Interrupts
from ddp_notebook.run.output.screen import Screen
from ddp_notebook.torchrun import start_job
from ddp_notebook.torchrun.job import TorchrunJob
from ddp_notebook.torchrun.output_pipes import PipeReader
from ddp_notebook.wire.store import listen_here
from tests.conftest import wait_until


@pytest.fixture(autouse=True)
def here(jobs, monkeypatch):
    monkeypatch.chdir(jobs.folder)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield
    attached_job.let_go()


@pytest.mark.long
@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("", "there is no script to run"),
        ("--nproc-per-node x train.py", "--nproc-per-node must be a number of ranks or one of auto, "),
        ("--nproc_per_node=0 train.py", ", got '0'"),
        ("--nproc-per-node cuda train.py", "--nproc-per-node must be a number of ranks or one of auto, "),
        (
            "--nnodes 3:1 train.py",
            "--nnodes must be a number of agents, or a minimum and maximum such as 1:3, got '3:1'",
        ),
        ("--nnodes 1: train.py", ", got '1:'"),
        ("--nproc-per-node 2", "there is no script"),
        ("nothing.py", "'nothing.py' must be a file in "),
        ("--agents x train.py", r"--agents must be a number from 1 to 256 \(got 'x'\)"),
        ("--agents", "--agents needs a value"),
        ("--standalone train.py", "leave out --standalone"),
        ("--rdzv_id=7 train.py", "leave out --rdzv_id=7"),
        ("'train.py", "No closing quotation"),
        ("--no-python train.py", "leave out --no-python"),
        ("-m", "-m needs the name of a module"),
    ],
)
def test_what_cannot_be(line, why):
    with pytest.raises(UsageError, match=why):
        start_job.read(line)


@pytest.mark.parametrize(
    ("options", "least", "most"),
    [("--nnodes 1:3", 1, 3), ("--nproc-per-node 2 --nnodes=2", 2, 2), ("--nproc-per-node 2", 1, 1), ("", 1, 1)],
)
def test_what_lets_one_more_agent_join(options, least, most):
    asked = start_job.read(f"--name 'my job' {options} -m train")
    assert (asked.least_agents, asked.most_agents) == (least, most)
    joins = asked.joins("unix:@name")
    assert joins.startswith("DDP_NOTEBOOK_NAME='my job' ") and f"--rdzv-id={asked.key}" in joins
    assert joins.endswith(f"{options} -m ddp_notebook.attach -m train")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("--nnodes 3", ": torchrun waits for 3 agents, and 1 started here; one more, in a shell: "),
        ("--nnodes 2 --agents 2", ""),
        ("--nnodes 1:3", ""),
        ("--nproc-per-node 2", ""),  # the ranks import torch, which takes long on a busy machine
    ],
)
def test_missing_agents_explain_late_ranks(options, why):
    said = start_job.read(f"{options} -m train").why_alone("unix:@name")
    assert said.startswith(why) and bool(said) == bool(why)


def test_options_of_the_notebooks_own_may_stand_among_torchruns():
    asked = start_job.read("--nnodes 1:3 --agents 2 --nproc-per-node=1 --name=mine -m train --agents 7")
    assert (asked.agents, asked.name) == (2, "mine")
    assert asked.options == ["--nnodes", "1:3", "--nproc-per-node=1"]
    assert asked.program == ["-m", "train", "--agents", "7"]


@pytest.mark.processes
def test_lines_of_a_rank_are_whole():
    """Two ranks write at once, and a character or a line can be split over several reads."""
    listener, place = listen_here("")
    ours = [os.pipe() for _ in range(2)]
    pipes = PipeReader(listener, [reads for reads, _ in ours])
    code = """
import os, sys
from ddp_notebook.rank.script.output import to_notebook
to_notebook()
for _ in range(20):
    os.write(1, 'é'.encode()[:1]); os.write(1, 'é'.encode()[1:] + 50_000 * b'x'); print(os.environ['RANK'])
print('bad', file=sys.stderr)
"""
    environment = {**os.environ, OUTPUT_VARIABLE: place.at, "WORLD_SIZE": "2"}
    ranks = [subprocess.Popen([sys.executable, "-c", code], env={**environment, "RANK": str(n)}) for n in range(2)]
    said: dict[tuple[int, str], str] = {}
    until = time.monotonic() + 60
    while (pipes.is_open or not pipes.output.empty()) and time.monotonic() < until:
        if ours and all(one.poll() is not None for one in ranks):
            os.close(ours.pop()[1])  # torchrun closes it when it ends
        with contextlib.suppress(queue.Empty):
            one = pipes.output.get(timeout=0.05)
            said[one.rank, one.stream] = said.get((one.rank, one.stream), "") + one.text
    assert pipes.has_ended and pipes.world_size == 2 and [one.returncode for one in ranks] == [0, 0]
    pipes.close()
    for n in range(2):
        assert said[n, "stdout"] == f"é{'x' * 50_000}{n}\n" * 20 and said[n, "stderr"] == "bad\n"


@pytest.mark.processes
def test_text_of_stdout_and_stderr_of_a_rank_keeps_its_order():
    listener, place = listen_here("")
    ours = [os.pipe() for _ in range(2)]
    pipes = PipeReader(listener, [reads for reads, _ in ours])
    code = """
import sys
from ddp_notebook.rank.script.output import to_notebook
to_notebook()
for n in range(30):
    print(n, file=(sys.stdout, sys.stderr)[n % 3 == 1])
"""
    environment = {**os.environ, OUTPUT_VARIABLE: place.at, "RANK": "0", "WORLD_SIZE": "1"}
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=60).returncode == 0
    for _, far in ours:
        os.close(far)
    wait_until(lambda: not pipes.is_open, 20)
    said = "".join(f"{one.stream} {line}\n" for one in pipes.close() for line in one.text.splitlines())
    assert said == "".join(f"{('stdout', 'stderr')[n % 3 == 1]} {n}\n" for n in range(30))


def _write_on(fd: int) -> None:
    with contextlib.suppress(BrokenPipeError):
        while True:
            os.write(fd, b"more\n")
            time.sleep(0.001)


@pytest.mark.slow
@pytest.mark.parametrize("pipe", ["closed", "held open", pytest.param("written on", marks=pytest.mark.long)])
def test_pending_output_of_torchrun_is_shown_and_logged(jobs, capsys, monkeypatch, pipe):
    """All output is shown, even if this is slow. A process that keeps a pipe of the rank open does not delay the
    cell."""
    monkeypatch.setattr(start_job, "_END_S", 0.1)
    write = Screen.show

    def write_slowly(self: Screen, shown: OutputItem) -> None:
        time.sleep(0.02)
        write(self, shown)

    monkeypatch.setattr(Screen, "show", write_slowly)
    listener, place = listen_here("")
    torchrun, rank = [os.pipe() for _ in range(2)], [os.pipe() for _ in range(2)]
    pipes = PipeReader(listener, [reads for reads, _ in torchrun])
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.connect(place.address)
        socket.send_fds(line, [b"0 1 0123456789abcdef"], [reads for reads, _ in rank])
        assert line.recv(1) == b"+"
    for number in range(60):
        os.write(rank[0][1], f"line {number}\n".encode())
        wait_until(lambda: pipes.output.qsize() > number, 10)  # noqa: B023
    os.write(rank[1][1], b"the error\n")
    for fd in [far for _, far in torchrun] + [near for near, _ in rank]:
        os.close(fd)
    if pipe == "closed":
        for _, far in rank:
            os.close(far)
    elif pipe == "written on":
        threading.Thread(target=_write_on, args=[rank[0][1]]).start()
    wait_until(lambda: pipes.has_ended, 10)
    job = TorchrunJob("key", "mine")
    job.keep_logs(str(jobs.folder))
    try:
        with subprocess.Popen(["true"]) as process, Interrupts(lambda: None) as interrupts:
            start_job._Follower(start_job.read("-m train"), "", job, process, pipes, interrupts).follow()
        left = pipes.close()
        expected = "".join(f"line {number}\n" for number in range(60))
        log = job.log(0)
        assert log.startswith(expected) and "the error\n" in log
        if pipe == "written on":
            return
        assert left == [] and log == f"{expected}the error\n"
        shown = capsys.readouterr()
        assert shown.out == "".join(f"[0] line {number}\n" for number in range(60)) and shown.err == "[0] the error\n"
    finally:
        job.close()


@pytest.mark.slow
def test_a_job_is_started_shown_and_looked_at(jobs, capsys):
    jobs.script("train(6)\nsys.stdout.write(f'done {sys.argv[1:]}\\n')\nprint('loss', 0.25 + rank, file=sys.stderr)")
    job = start_job.run(start_job.read("--name mine --nproc-per-node 2 train.py --lr 1"))
    shown = capsys.readouterr()
    assert shown.out == "[0-1] done ['--lr', '1']\n" and "[0-1] loss 0.25 | 1.25\n" in shown.err
    assert (job.name, job.world_size, job.report().cell) == ("mine", 2, 1)
    assert job.log(1) == "done ['--lr', '1']\nloss 1.25\n"
    assert attached_job.current() is job


@pytest.mark.long
@pytest.mark.parametrize("option", ["--fold off", "--tee 3"])
def test_lines_are_not_folded_where_the_line_says_so(jobs, capsys, option):
    """With --tee, torchrun itself writes and labels the lines."""
    jobs.script("print('same')", head="")
    start_job.run(start_job.read(f"{option} --nproc-per-node 2 train.py"))
    shown = sorted(
        line.removeprefix("[default0]:").removeprefix("[default1]:") for line in capsys.readouterr().out.split("\n")
    )
    assert shown == (["", "[0] same", "[1] same"] if "fold" in option else ["", "same", "same"])


@pytest.mark.long
def test_one_that_fails_says_where(jobs, capsys):
    jobs.script(
        "layer = torch.nn.Linear(2, 2)\ndef hook(*_):\n    raise ValueError('bad batch')\n"
        "step = torch.optim.SGD(layer.parameters(), lr=0.1)\nstep.register_step_post_hook(hook)\n"
        "layer(torch.ones(2)).sum().backward()\nif rank == 1:\n    step.step()"
    )
    with pytest.raises(JobFailedError, match=r"status 1.*rank 1: ValueError: bad batch, at train.py:"):
        start_job.run(start_job.read("--nproc-per-node 2 train.py"))
    shown = capsys.readouterr().err
    assert "train.py FAILED" in shown and "ddp_notebook.attach FAILED" not in shown
    assert "ValueError: bad batch" in shown and "train.py" in shown
    frames = [line for line in shown.splitlines() if "File " in line and "ddp_notebook" in line]
    assert frames == [], shown
    job = attached_job.current()
    assert job is not None and "attempt 1 has" not in repr(job.status())


@pytest.mark.long
@pytest.mark.parametrize("killed", ["notebook", pytest.param("parent of agents", marks=pytest.mark.long)])
def test_nothing_outlives_a_killed_notebook(jobs, killed):
    jobs.script("wait_for('never')")
    code = "from ddp_notebook.torchrun import start_job; start_job.run(start_job.read('--nproc-per-node 2 train.py'))"
    notebook = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: len(jobs.ranks()) == 2, 60)
        below = psutil.Process(notebook.pid).children(recursive=True)
        assert len(below) >= 4, "a keeper, an agent, two ranks"
        if killed != "notebook":
            children = psutil.Process(notebook.pid).children()
            [parent] = [one for one in children if "ddp_notebook.launch.elastic.parent" in one.cmdline()]
            parent.kill()
            notebook.wait(20)
    finally:
        notebook.kill()
        notebook.wait()
    wait_until(lambda: not any(one.is_running() and one.status() != "zombie" for one in below), 10)


@pytest.mark.long
def test_a_job_goes_on_with_the_agents_that_are_left(jobs):
    """Any agent may end, because the rendezvous runs in the parent of the agents."""
    jobs.script("""
size = dist.get_world_size()
train(10)
dist.barrier()
open("trained", "w").close()
while size == 2:
    dist.all_reduce(torch.ones(1))
sys.stdout.write(f"done of {size}\\n")
""")
    killed = []

    def kill_one() -> None:
        # If the agent were killed earlier, the other rank would wait in torch's init_process_group until the timeout.
        wait_until((jobs.folder / "trained").exists, 60)
        [first, *_] = sorted(who for one in jobs.ranks() if (who := launcher(one.about)) is not None)
        psutil.Process(first[0]).kill()
        killed.append(first)

    thread = threading.Thread(target=kill_one)
    thread.start()
    job = start_job.run(start_job.read("--agents 2 --nnodes 1:2 --nproc-per-node 1 --max-restarts 1 train.py"))
    thread.join()
    assert job.round is not None and (len(killed), job.round.number, job.world_size) == (1, 2, 1)
    assert [one.world_size for one in job.recordings] == [2, 1] and job.report().cell == 2
    assert any("ended without a message" in line for line in job.events.last(9)), job.events.last(9)
