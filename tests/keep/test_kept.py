"""Attaching to a session whose notebook is gone restores the user's state."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from ddp_notebook.errors import StartError, UsageError
from ddp_notebook.magics import DDPMagics
from ddp_notebook.registry import entries
from tests.conftest import is_within, marked_processes, wait_until
from tests.keep.conftest import kill

STEPS = """%%on_all_ranks
import os, time
from IPython.display import display, HTML
for step in range(40):
    while step == 30 and not os.path.exists({go!r}): time.sleep(0.01)
    dist.all_reduce(torch.ones(1))
    print("step", step)
    if step == 5:
        display(HTML("<b>five</b>"))
    time.sleep(0.02)
total = 40
"""


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if "step " in line]


@pytest.mark.long
def test_an_idle_session_goes_on_in_another_kernel(notebook):
    first = notebook("%ddp_start 2 --keep 1")
    first.run("%%on_all_ranks\nx = torch.arange(3) + rank")
    kill(first)

    second = notebook()
    attached = second.run("%ddp_attach")
    assert attached.status == "ok" and "kept-1: <Session: 2 ranks" in attached.stdout
    assert is_within(attached.duration_s, 1.0)
    assert second.run("%on_all_ranks x.sum().item()").stdout == "[0] 3\n[1] 6\n"
    reduced = second.run("%%on_all_ranks\nt = torch.ones(1) * rank; dist.all_reduce(t); t.item()")
    assert reduced.stdout == "[0-1] 1.0\n"
    [entry] = entries.entries()
    folders = Path(entry.folder)
    wait_until(lambda: len(list(folders.glob("ddp_notebook-session-*"))) == 1, 5.0, "that of the first has gone")
    assert second.run("%ddp_stop").stdout == "stopped 2 ranks\n"
    assert entries.entries() == []


@pytest.mark.long
@pytest.mark.parametrize(
    "attach",
    [
        "%ddp_attach|pass",
        *(
            pytest.param(line, marks=pytest.mark.long)
            for line in ("%ddp_attach|%ddp_attach --wait", "%ddp_attach --wait")
        ),
    ],
)
def test_a_running_cell_is_shown_once_and_waited_for(notebook, attach, tmp_path):
    go = tmp_path / "go"
    first = notebook("%ddp_start 2 --keep 1")
    first.start(STEPS.format(go=str(go)))
    first.wait_for_text("step 7")
    kill(first)

    second = notebook()
    line, _, then = attach.partition("|")
    if not then:
        go.touch()
    begun = second.run(line)
    if then:
        assert "cell [3] of the earlier notebook continues as job 1" in begun.stdout
        prompts = second.run("import ddp_notebook\nlist(ddp_notebook.current().recording.prompts.values())")
        assert prompts.displays[0]["text/plain"] == "['In [3]']", "the name of the cell in the status and the monitor"
        go.touch()
        assert second.run(then).status == "ok"
        assert second.run("%on_all_ranks total").stdout == "[0-1] 40\n", "it has waited its turn"
        second.wait_under(list(second._replies)[1], lambda under: "job 1 is done" in under.stdout)
    assert begun.status == "ok", begun
    assert lines(begun.stdout) == [f"[0-1] step {step}" for step in range(40)]
    assert [data.get("text/html") for data in begun.displays if "text/html" in data] == ["<b>five</b>"]
    assert second.run("%on_all_ranks total").stdout == "[0-1] 40\n"
    counted = second.run("import ddp_notebook\nlen(ddp_notebook.current().recording.collectives())")
    assert counted.displays[0]["text/plain"] == "80", "no row is lost, and none is there twice"


@pytest.mark.long
def test_a_training_survives_the_death_of_a_rank(notebook):
    kernel = notebook("%ddp_start 2 --keep 1")
    kernel.run("%%on_all_ranks\nnet = torch.nn.Linear(2, 2); opt = torch.optim.SGD(net.parameters(), 0.1); done = []")
    steps = "for step in ddp_notebook.survive(net, opt, done, steps=60):\n    with step: train(step)"
    body = "    net(torch.ones(1, 2)).sum().backward(); opt.step(); done.append(int(step)); time.sleep(0.04)"
    kernel.run(f"%%on_all_ranks\nimport time, ddp_notebook\ndef train(step):\n    dist.barrier()\n{body}")
    kernel.run("%ddp_fault kill --ranks 1 --after 1")  # in the loop, which starts later on a busy machine
    reply = kernel.run(f"%%on_all_ranks\n{steps}\nprint(done == list(range(60)))")
    assert reply.stdout == "[0-1] True\n" and "rank 1 died (killed by SIGKILL) and was replaced" in reply.stderr, reply


@pytest.mark.long
def test_how_a_cell_ended_unattended_is_told(notebook):
    first = notebook("%ddp_start 2 --keep 1")
    first.start("%%on_all_ranks\nimport time\nprint('begun')\ntime.sleep(1)\nprint('late')\n1 / (1 - rank)")
    first.wait_for_text("begun")
    kill(first)
    wait_until(lambda: "1 ended unattended" in listed(), 10, "the cell has ended")

    second = notebook()
    for line in ("%on_all_ranks 1", "%ddp_status", "%ddp_report", "%ddp_jobs"):
        assert second.run(line).evalue == (
            "this notebook has no ranks; kept ranks are running: %ddp_attach kept-1 attaches to them. "
            "%ddp_start 4 starts new ones"
        )
    told = second.run("%ddp_attach")
    assert told.status == "error" and told.ename == "RankError", told
    assert "ZeroDivisionError" in told.traceback and "1 / (1 - rank)" in told.traceback
    assert "] late" in told.stdout
    assert second.run("%ddp_attach").stdout.count("late") == 0, "once"
    assert " of the earlier notebook has failed, and was shown here\n" in second.run("%ddp_jobs").stdout
    assert second.run("%on_all_ranks rank").stdout == "[0] 0\n[1] 1\n"


@pytest.mark.long
def test_a_running_cell_can_be_stopped(notebook):
    first = notebook("%ddp_start 2 --keep 1")
    first.run("%%on_all_ranks\nimport time\ny = 7")
    first.start("%%on_all_ranks\nprint('begun')\nwhile True: dist.all_reduce(torch.ones(1)); time.sleep(0.01)")
    first.wait_for_text("begun")
    kill(first)

    second = notebook()
    assert "cell [4] of the earlier notebook continues as job 1" in second.run("%ddp_attach").stdout
    [_, row] = second.run("%ddp_jobs").stdout.splitlines()
    assert row.split()[:5] == ["1", "In", "[4]", "0-1", "running"] and float(row.split()[5]) > 0.3, row
    assert second.run("%ddp_cancel 1").stdout.startswith("job 1 was cancelled after ")
    assert second.run("%on_all_ranks y").stdout == "[0-1] 7\n"


@pytest.mark.long
def test_the_next_notebook_ends_a_cell_without_a_rank(notebook):
    first = notebook("%ddp_start 2 --keep 1 --grace 1")
    first.start(
        "%%on_all_ranks\nprint('begun')\nif rank == 0: import time; time.sleep(3); dist.all_reduce(torch.ones(1))"
    )
    first.wait_for_text("begun")
    kill(first)

    second = notebook()
    second.run("%ddp_attach")
    reason = "rank 0 waits in all_reduce #1, and rank 1 has ended the cell without it"
    wait_until(lambda: "running" not in second.run("%ddp_jobs").stdout, 20, "the cell is ended")
    assert f"the cell was stopped: {reason} (rank 0); succeeded: rank 1" in second.run("%ddp_wait 1").evalue
    assert second.run("%%on_all_ranks\nx = torch.ones(1); dist.all_reduce(x); int(x)").stdout == "[0-1] 2\n"


@pytest.mark.long
def test_one_that_asks_is_answered_by_who_waits_for_it(notebook):
    first = notebook("%ddp_start 2 --keep 1")
    first.start("%%on_all_ranks\nprint('asks')\nname = input('who? ') if rank == 0 else 'nobody'\nname")
    first.wait_for_text("asks")
    wait_until(lambda: "cell [3] runs" in listed(), what="it runs")
    kill(first)

    second = notebook()
    second.run("%ddp_attach")
    wait_until(lambda: "waits at input()" in second.run("%ddp_attach").stdout, what="it asks")
    waits = second.start("%ddp_attach --wait")
    asked = second.client.get_stdin_msg(timeout=20)
    assert asked["content"]["prompt"] == "[0] who? "
    second.client.input("me")
    assert set(second.finish(waits).stdout.splitlines()[1:]) == {"[0-1] asks", "[0] 'me'", "[1] 'nobody'"}


SURVIVES = """%%on_all_ranks
import ddp_notebook, os, time
torch.manual_seed(rank)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
done = []
for step in ddp_notebook.survive(model, optimizer, done, steps=60{more}):
    while int(step) == 30 and not os.path.exists({go!r}): time.sleep(0.01)
    with step:
        model(torch.randn(8, 4)).pow(2).mean().backward()
        optimizer.step()
        done.append(int(step))
        time.sleep(0.02)
    print("step", int(step))
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "dies", ["alone", *(pytest.param(how, marks=pytest.mark.long) for how in ("attached", "shrinks"))]
)
def test_a_surviving_training_run_survives_a_new_notebook_too(notebook, dies, tmp_path):
    go = tmp_path / "go"
    first = notebook("%ddp_start 2 --keep 1")
    pid = int(first.run("import ddp_notebook; ddp_notebook.current().ranks.pids()[1]").displays[0]["text/plain"])
    first.start(SURVIVES.format(go=str(go), more=', on_loss="shrink"' if dies == "shrinks" else ""))
    first.wait_for_text("step 7")
    kill(first)
    if dies == "alone":
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not psutil.pid_exists(pid), what="it has died")
        go.touch()

    second = notebook()
    begun = second.run("%ddp_attach")
    if dies != "alone":
        os.kill(pid, signal.SIGKILL)
        go.touch()
    left, what = ("[0]", "left in") if dies == "shrinks" else ("[0-1]", "was replaced in")
    assert second.run("%on_all_ranks done == list(range(60))").stdout == f"{left} True\n"
    assert f"rank 1 died (killed by SIGKILL) and {what}" in begun.stdout + begun.stderr
    kill(second)

    third = notebook()
    assert third.run("%ddp_attach").status == "ok", "the end of the process that was replaced is not that of the cell"
    assert third.run("%on_all_ranks len(done)").stdout == f"{left} 60\n"


@pytest.mark.long
def test_without_keep_all_is_gone_in_5_s(notebook):
    before = marked_processes()
    kernel = notebook("%ddp_start 2")
    assert entries.entries() == []
    kill(kernel)
    wait_until(lambda: not marked_processes() - before, 5.0, "nothing is left")


def listed() -> str:
    done = subprocess.run([sys.executable, "-m", "ddp_notebook", "list"], capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.long
def test_from_a_shell(notebook):
    assert listed() == "nothing runs on this machine that can be attached to\n"
    command = [sys.executable, "-m", "ddp_notebook", "stop", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "usage: python -m ddp_notebook list | stop NAME | logs NAME | diff A B\n"
    first = notebook("%ddp_start 2 --keep 1")
    first.run("%%on_all_ranks\nprint('from rank', rank)")
    assert "kept-1: 2 ranks" in listed() and "drives it" in listed()
    kill(first)
    wait_until(lambda: "alone for" in listed(), what="nobody drives it")

    second = notebook()
    there = second.run("%ddp_start 2 --keep 1").stdout
    assert there.startswith("also running: kept-1 (kept ranks of this folder); attach with %ddp_attach kept-1\n")
    shell = [sys.executable, "-m", "ddp_notebook"]
    logs = subprocess.run([*shell, "logs", "kept-1"], capture_output=True, text=True)
    assert logs.stdout == "---- rank 0\nfrom rank 0\n---- rank 1\nfrom rank 1\n"
    for name in ("kept-1", "kept-2"):
        assert subprocess.run([*shell, "stop", name], capture_output=True, text=True).stdout == f"stopped {name}\n"
    assert "has ended: python -m ddp_notebook stop" in second.run("%on_all_ranks 1").traceback
    gone = subprocess.run([*shell, "stop", "kept-1"], capture_output=True, text=True)
    assert gone.returncode == 1 and "cannot attach to 'kept-1'" in gone.stderr


@pytest.mark.long
def test_it_ends_after_its_hours(notebook):
    first = notebook(f"%ddp_start 2 --keep {2 / 3600}")
    kill(first)
    wait_until(lambda: not entries.entries(), 10, "its time is over")


@pytest.mark.long
def test_a_kept_session_ends_after_hours_without_running_cells(notebook, monkeypatch):
    monkeypatch.setenv("DDP_NOTEBOOK_KEEP_IDLE_H", str(1.5 / 3600))
    first = notebook("%ddp_start 2 --keep 1")
    first.start("%%on_all_ranks\nimport pathlib, time\nprint('begun')\ntime.sleep(5)")
    first.wait_for_text("begun")
    began = time.monotonic()
    kill(first)
    wait_until(lambda: not entries.entries(), 20, "no notebook was attached, and nothing has run")
    assert time.monotonic() - began > 5.0, "the cell had not ended"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("%ddp_attach", "nothing to attach to; %ddp_start 4 --keep starts ranks"),
        ("%ddp_attach kept-9", "cannot attach to 'kept-9': it has ended, or the name is wrong"),
        ("%ddp_attach ../x", "cannot attach to '../x'"),
        ("%ddp_start 2 --keep 0", "--keep must be a positive number of hours, at most"),
        ("%ddp_start 2 --keep soon", "--keep must be a number of hours, got 'soon'"),
        ("%ddp_start 2 --keep-output 5", "--keep-output requires --keep, e.g. --keep 12 --keep-output 5"),
        (
            "%ddp_start 2 --keep --keep-recording 0",
            "--keep-recording must be a positive number of megabytes",
        ),
    ],
)
def test_bad_lines_say_what_to_write(runtime, line, words):
    name, _, rest = line[1:].partition(" ")
    with pytest.raises(UsageError) as caught:
        getattr(DDPMagics(), name)(rest)
    assert words in str(caught.value)


@pytest.mark.processes
def test_a_full_disk_is_told(runtime):
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "full", runtime], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root can have a disk that is full")
    try:
        with contextlib.suppress(OSError):
            (runtime / "fill").write_bytes(bytes(1 << 20))
        magics: Any = DDPMagics()
        with pytest.raises(StartError, match=r"the disk is full: free some of it \(.*/ddp_notebook or "):
            magics.ddp_start("2 --keep")
        assert list((runtime / "ddp_notebook").iterdir()) == [], "no socket stays"
    finally:
        subprocess.run(["umount", runtime], check=True)


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts file systems")
def test_a_recording_whose_disk_is_full(runtime, make_kernel, tmp_path):
    """Later cells still run, and one line reports that the recording is incomplete."""
    (small := tmp_path / "small").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(small)], check=True)
    env = {"XDG_RUNTIME_DIR": str(runtime), "TMPDIR": str(small), "DDP_NOTEBOOK_PRELOAD": "0"}
    log = "%%on_all_ranks\nfor step in range({n}): log(loss=float(step))\nprint('logged', {n})"
    try:
        first = make_kernel(env=env)
        first.run("%load_ext ddp_notebook")
        assert first.run("%ddp_start 2 --keep 1").status == "ok"
        first.run("%on_all_ranks kept = 'kept'")
        assert "logged 100" in first.run(log.format(n=100)).stdout
        with contextlib.suppress(OSError):
            (small / "full").write_bytes(bytes(8 << 20))
        logged = first.run(log.format(n=20000))
        assert "logged 20000" in logged.stdout
        told = [logged.stderr]

        def is_told() -> bool:
            reply = first.run("%on_all_ranks kept")
            assert reply.stdout == "[0-1] 'kept'\n"
            told.append(reply.stderr)
            return "a part of the recording is lost, because it cannot be written: " in "".join(told)

        wait_until(is_told, 10.0)
        assert "No space left on device; free space there" in "".join(told)
        kill(first)

        second = make_kernel(env={**env, "TMPDIR": str(tmp_path)})
        second.run("%load_ext ddp_notebook")
        attached = second.run("%ddp_attach")
        assert attached.status == "ok", attached.traceback
        assert second.run("%on_all_ranks kept").stdout == "[0-1] 'kept'\n"
        assert second.run("%on_all_ranks dist.all_reduce(torch.ones(1))").status == "ok"
        (small / "full").unlink()
        assert "logged 10" in second.run(log.format(n=10)).stdout
        assert second.run("%ddp_stop").status == "ok"
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


def test_idle_hours_that_are_no_number(runtime, monkeypatch):
    monkeypatch.setenv("DDP_NOTEBOOK_KEEP_IDLE_H", "soon")
    magics: Any = DDPMagics()
    with pytest.raises(UsageError, match="_KEEP_IDLE_H must be a positive number of hours, such as 12, got soon"):
        magics.ddp_start("2 --keep")


@pytest.mark.long
@pytest.mark.parametrize(
    "mode", [pytest.param(0o700, id="as ever"), pytest.param(0o755, id="whose folder of entries is open to others")]
)
def test_the_end_of_the_keeper_is_that_of_all_and_is_told(notebook, runtime, mode):
    before = marked_processes()
    kernel = notebook("%ddp_start 2 --keep 1")
    [entry] = entries.entries()
    (runtime / "ddp_notebook").chmod(mode)
    os.kill(entry.pid, signal.SIGKILL)
    wait_until(lambda: "keeper of kept-1 has ended" in kernel.run("%on_all_ranks 1").traceback, what="it is told")
    (runtime / "ddp_notebook").chmod(0o700)
    status = kernel.run("%ddp_status").stdout
    assert "keeper of kept-1 has ended" in status and "in another kernel" not in status
    wait_until(lambda: len(marked_processes() - before) == 1, 5.0, "the kernel is left")
    assert entries.entries() == [] and not Path(entry.folder).exists()
    assert kernel.run("%ddp_restart").status == "ok"
    assert kernel.run("%on_all_ranks rank").stdout == "[0] 0\n[1] 1\n"


_RESUME = """import os, signal, time
from ddp_notebook import current
cluster = current()._parts.cluster
pid = cluster.hosts[0].pid
os.kill(pid, signal.SIGSTOP)
until = time.monotonic() + 10
while not cluster.is_stopped and time.monotonic() < until:
    time.sleep(0.01)
os.kill(pid, signal.SIGCONT)
print(current().run("7", quiet=True)[0].result)"""


def test_a_cell_runs_as_soon_as_the_host_server_is_resumed(notebook):
    """The keeper reports a moment later that its host server is running again."""
    kernel = notebook("%ddp_start 2 --keep 1")
    for _ in range(5):
        reply = kernel.run(_RESUME)
        assert reply.stdout == "7\n", reply


@pytest.mark.long
def test_a_kernel_that_restarts_leaves_it_alone(notebook):
    kernel = notebook("%ddp_start 2 --keep 1")
    kernel.run("%%on_all_ranks\nx = rank")
    kernel.manager.restart_kernel(now=False)
    kernel.client.wait_for_ready(timeout=30)
    kernel.run("%load_ext ddp_notebook")
    assert "kept-1: <Session: 2 ranks" in kernel.run("%ddp_attach").stdout
    assert kernel.run("%on_all_ranks x").stdout == "[0] 0\n[1] 1\n"


@pytest.mark.long
def test_widgets_values_and_figures_of_one_that_is_attached(notebook):
    kill(notebook("%ddp_start 2 --keep 1"))
    kernel = notebook("%ddp_attach")
    kernel.run("%%on_all_ranks\nbig = torch.arange(1_000_000) + rank")
    kernel.run("%ddp_pull big")
    assert kernel.run("int(big[1][0]), len(big[0])").displays[0]["text/plain"] == "(1, 1000000)"
    kernel.run("import numpy; y = numpy.ones(500_000)")
    kernel.run("%ddp_push y")
    assert kernel.run("%on_all_ranks float(y.sum())").stdout == "[0-1] 500000.0\n"
    assert kernel.run("%%on_ranks 1\nimport os; os._exit(3)").ename == "RankDiedError"
    assert "rank 1 was replaced" in kernel.run("%ddp_heal").stdout
    assert kernel.run("%%on_all_ranks\nt = torch.ones(1); dist.all_reduce(t); t.item()").stdout == "[0-1] 2.0\n"
    assert kernel.run("import ddp_notebook; ddp_notebook.current().client.ids").displays[0]["text/plain"] == "[0, 1]"
    stopped = kernel.start(
        "%%on_all_ranks\nprint('in')\nif rank == 0: dist.barrier()\nelse: import time; time.sleep(60)"
    )
    kernel.wait_for_text("in")
    kernel.interrupt()
    assert kernel.finish(stopped).ename in ("KeyboardInterrupt", "RankError")


@pytest.mark.long
def test_a_machine_that_is_taken_away_from_a_kept_session(notebook, tmp_path):
    """The keeper receives the notice even without a notebook. The next notebook reads where the state was saved."""
    go, folder = tmp_path / "go", tmp_path / "saved"
    first = notebook(f"%ddp_start 2 --keep 1 --on-preempt save {folder}")
    first.start(SURVIVES.format(go=str(go), more=""))
    first.wait_for_text("step 7")
    kill(first)
    [entry] = entries.entries()
    os.kill(entry.pid, signal.SIGTERM)
    go.touch()
    wait_until(lambda: list(folder.glob("step-*/.metadata")), 20.0, "it is saved")

    second = notebook()
    attached = second.run("%ddp_attach")
    assert attached.ename == "RankError" and "saved their state before step" in attached.evalue, attached
    os.kill(entry.pid, signal.SIGTERM)
    wait_until(lambda: not psutil.pid_exists(entry.pid), what="a second one does what it always did")
