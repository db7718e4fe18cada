"""Jobs of torchrun at the same time as kept sessions: one list and one `%ddp_attach` for both, from notebooks and
shells."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import closing

import pytest

from ddp_notebook import attached_job
from ddp_notebook.errors import UsageError
from ddp_notebook.registry import entries
from ddp_notebook.torchrun.job import TorchrunJob
from tests.conftest import wait_until
from tests.keep.conftest import notebook, runtime  # noqa: F401  # fixtures
from tests.torchrun.conftest import WAITS


def shell(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "ddp_notebook", *words], capture_output=True, text=True)


@pytest.mark.long
def test_a_shell_lists_and_ends_a_job(jobs):
    process = jobs.start("", name="waits.py", head=WAITS)
    wait_until(lambda: len(jobs.ranks()) == 2, 60)
    [name] = {one.name for one in jobs.ranks()}
    assert shell("list").stdout.startswith(f"{name}: {jobs.folder}/waits.py --lr 1, 2 ranks for ")
    logs = shell("logs", name)
    assert logs.returncode == 1 and "is in the terminal that started it; torchrun --log-dir DIR" in logs.stderr
    assert shell("stop", "waits").stdout == f"stopped {name}\n"
    process.communicate(timeout=10)
    assert process.returncode != 0 and entries.entries() == []


@pytest.mark.long
def test_one_attach_for_both(notebook, runtime, tmp_path):  # noqa: F811
    script = tmp_path / "waits.py"
    script.write_text(WAITS)
    command = [sys.executable, "-m", "ddp_notebook.attach", "--name", "plain", str(script)]
    with subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "XDG_RUNTIME_DIR": str(runtime)}) as process:
        try:
            wait_until(entries.entries, 20)
            started = notebook().run("%ddp_start 2 --keep 1").stdout
            assert "also running: plain (torchrun job); attach with %ddp_attach plain\n" in started
            kernel = notebook()
            kernel.run(f"%cd {tmp_path}")
            several = kernel.run("%ddp_attach")
            assert several.ename == "UsageError" and "several are running; choose one:" in several.traceback
            assert "%ddp_attach plain: " in several.traceback and "%ddp_attach kept-1: " in several.traceback
            listed = shell("list").stdout
            assert "plain: " in listed and "kept-1: 2 ranks on" in listed
            assert "its start, without torch so far" in kernel.run("%ddp_attach plain").stdout
            assert "job plain, attempt 1" in kernel.run("%ddp_attach").stdout, "it has that one"
            refused = kernel.run("%on_all_ranks 1")
            assert refused.ename == "NoSessionError" and "plain is a torchrun job" in refused.traceback
            assert "leave out --look" in kernel.run("%ddp_attach plain --look").traceback
            both = kernel.run("%ddp_attach kept-1").stdout
            assert both.startswith("detached from plain, which goes on\n") and "This notebook has the monitor" in both
            kept = kernel.run("from ddp_notebook.run import ended_recording; ended_recording.last()")
            assert kept.status == "ok" and kept.displays == [], "nothing is kept where there are ranks"
            assert kernel.run("%ddp_attach plain").status == "ok"
            stopped = kernel.run("%ddp_stop").stdout
            assert stopped == (
                "detached from plain, which goes on\n2 ranks of the notebook's session remain: %ddp_stop detaches from "
                "them\n"
            )
            assert "This notebook has the monitor" in kernel.run("%ddp_status").stdout
            assert process.poll() is None
        finally:
            (tmp_path / "end").touch()
    assert process.returncode == 0


@pytest.mark.long
def test_what_a_job_has_recorded_is_shown_when_it_was_let_go(notebook, jobs, tmp_path):  # noqa: F811
    script = jobs.script("train(6)")
    kernel = notebook()
    ran = kernel.run(f"%ddp_torchrun --name mine --nproc-per-node 2 {script}")
    assert ran.status == "ok", ran
    assert kernel.run("%ddp_stop").stdout == "detached from mine, which has ended\n"
    left = "this notebook is detached from mine; the recording remains (mine, 2 ranks)\n"
    assert kernel.run("%ddp_report").stdout.startswith(f"{left}attempt 1: 6 steps on 2 ranks, ")
    assert kernel.run(f"%ddp_trace {tmp_path}/trace.json").stdout.startswith(left)
    assert "%ddp_report, %ddp_monitor and %ddp_trace still show what" in kernel.run("%ddp_status").traceback


@pytest.mark.long
def test_reports_are_about_the_ranks_again_when_a_job_has_ended(notebook, jobs):  # noqa: F811
    """Before that the log of the job can be read. During its cell nothing can be read."""
    script = jobs.script("train(6)\nprint('done')")
    kernel = notebook("%ddp_start 2")
    assert kernel.run(f"%ddp_torchrun --name mine --nproc-per-node 2 {script}").status == "ok"
    assert kernel.run("%ddp_status").stdout.startswith("job mine, ")
    logs = kernel.run("import ddp_notebook\nddp_notebook.attach_job().name, ddp_notebook.attach_job('mine').log(1)")
    assert logs.status == "ok" and logs.displays[0]["text/plain"] == r"('mine', 'done\n')", logs
    train = "model = torch.nn.Linear(2, 1); opt = torch.optim.SGD(model.parameters(), 0.1)\nfor _ in range(4):\n"
    kernel.run(f"%%on_all_ranks\n{train}    model(torch.ones(2)).sum().backward(); opt.step(); dist.barrier()")
    assert kernel.run("%ddp_report").stdout.startswith("In [6]: 4 steps on 2 ranks")
    assert kernel.run("%ddp_status").stdout.startswith("rank  host ")
    failed = kernel.run(f"%ddp_torchrun --name failed --max-restarts many {script}")
    assert failed.ename == "JobFailedError"
    assert (
        kernel.run("%ddp_status").evalue == "job 'failed' has ended, and none of its ranks connected to this notebook"
    )
    stopped = kernel.run("%ddp_stop").stdout
    remain = "2 ranks of the notebook's session remain: %ddp_stop ends them"
    assert stopped == f"detached from failed, which has ended\n{remain}\n"
    assert kernel.run("%ddp_stop").stdout == "stopped 2 ranks\n"


@pytest.mark.slow
def test_an_attempt_that_is_there_can_be_shown(jobs, monkeypatch):
    """The thread that finds the first rank creates the monitor, which takes a while."""
    make = TorchrunJob._new_placing

    def make_slowly(*of_job):
        time.sleep(0.3)
        return make(*of_job)

    monkeypatch.setattr(TorchrunJob, "_new_placing", make_slowly)
    with closing(TorchrunJob("mine", "mine")) as job:
        command = [sys.executable, "-m", "ddp_notebook.attach", str(jobs.script("", head=WAITS))]
        env = {**os.environ, "TORCHELASTIC_RUN_ID": "mine"}
        with subprocess.Popen(command, cwd=jobs.folder, env=env) as process:
            try:
                wait_until(lambda: job.round is not None, 20)
                assert job._views is not None and job.recordings == [job.recording]
            finally:
                jobs.touch("end")
    assert process.returncode == 0


@pytest.mark.slow
def test_one_of_another_version_keeps_nobody_from_the_rest(jobs):
    entries.enter("torchrun", "old-1", {"key": "1", "is": "nothing that is known here"})
    command = [sys.executable, "-m", "ddp_notebook.attach", "--name", "plain", str(jobs.script("", head=WAITS))]
    with subprocess.Popen(command, cwd=jobs.folder) as process:
        try:
            wait_until(lambda: len(jobs.ranks()) == 2, 20)
            with pytest.raises(UsageError, match=r"job 'old-1' .* runs ddp_notebook .*, which this kernel's version"):
                attached_job.attach_job("old")
            assert attached_job.attach_job("plain").world_size == 1
        finally:
            attached_job.let_go()
            jobs.touch("end")
    assert process.returncode == 0
