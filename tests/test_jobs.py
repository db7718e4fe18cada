"""Background cells in a front end: output under their own cell, other cells in parallel, and their end."""

from __future__ import annotations

import re
import time

import pytest

from tests.kernels import NotebookKernel, Reply


@pytest.fixture(scope="module")
def ranks(kernel):
    assert kernel.run("%ddp_start 2 --hang-after 0.5").status == "ok"
    assert kernel.run("%%on_all_ranks\nimport os, time, ipywidgets\nkept = rank").status == "ok"
    kernel.run("import os, tempfile, ddp_notebook\nsession = ddp_notebook.current()")
    return kernel  # the last test stops them


class Job:
    """A job started by `%%on_all_ranks --background`."""

    def __init__(self, kernel: NotebookKernel, code: str, options: str = "") -> None:
        self._kernel = kernel
        self._message = kernel.start(f"%%on_all_ranks --background{options}\n{code}")
        self.began = kernel.finish(self._message)
        assert self.began.status == "ok", self.began
        self.number = int(kernel.run("print([*session.jobs][-1].number)").stdout)
        self.prompt = int(kernel.run("print([*session.jobs][-1].prompt)").stdout)

    def wait_for(self, text: str) -> Reply:
        """Wait until this text appears under its cell. Return all output there."""
        return self.wait_until(lambda reply: text in reply.stdout + reply.stderr + reply.traceback)

    def wait_until(self, is_there) -> Reply:
        return self._kernel.wait_under(self._message, is_there)

    @property
    def line(self) -> str:
        """Return the current line about the job."""
        [said] = [line for line in self.began.stdout.splitlines() if line.startswith(f"job {self.number} ")]
        return said


def test_a_running_training_job_has_the_same_numbers_everywhere(ranks):
    job = Job(
        ranks,
        "import torch.nn as nn\nfrom torch.nn.parallel import DistributedDataParallel as DDP\n"
        "model, history = DDP(nn.Linear(256, 256)), []\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for step in range(400):\n"
        "    loss = model(torch.ones(8, 256)).mean()\n"
        "    loss.backward(); history.append(step); optimizer.step(); optimizer.zero_grad()\n"
        "    log(loss=loss.item()); time.sleep(0.01)",
    )
    label = f"In [{job.prompt}]"

    def status() -> str:
        return ranks.run("%ddp_status").stdout

    until = time.monotonic() + 30
    while f"\ntraining in {label}: " not in status():
        assert time.monotonic() < until, status()
    peeked = ranks.run("%ddp_peek history[-2:]").stdout
    assert re.search(r"^\[0(-1)?\] after \d+ steps?: \[\d+(, \d+)?\]$", peeked, re.MULTILINE), peeked
    pulled = ranks.run("%ddp_pull history\nprint(len(history[0]) < 400)").stdout
    assert pulled.endswith("True\n"), "it did not wait for the end of the job"
    assert "is done" in job.wait_for("is done").stdout
    number = ranks.run("run = session.recording.runs()[-1]\nprint(f'{run.per_step} ({run.definition})')").stdout.strip()
    assert f"\ntraining in {label}: 400 steps on 2 ranks, {number}, 263 kB of gradients in a step\n" in status()
    assert ranks.run("%ddp_report").stdout.startswith(f"{label}: 400 steps on 2 ranks, {number}, ")
    memory = [line.split() for line in status().splitlines()[1:3]]
    assert all(words[5] in ("MB", "GB") for words in memory), memory


@pytest.mark.long
def test_the_prompt_is_back_and_output_goes_on_under_the_cell(ranks):
    job = Job(ranks, "for step in range(4):\n    print('step', step); time.sleep(0.3)")
    assert "step 3" not in job.began.stdout
    local = ranks.run("import time; time.sleep(0.5); print('here')")
    assert (local.stdout, local.stderr) == ("here\n", "")
    assert job.line == f"job {job.number} runs on ranks 0,1; %ddp_wait {job.number} waits for it, " + (
        f"%ddp_cancel {job.number} ends it"
    )
    reply = job.wait_for("is done")
    assert re.fullmatch(rf"job {job.number} is done after \d\.\d s", job.line)
    assert reply.stdout.splitlines() == [job.line, *(f"[0-1] step {step}" for step in range(4))]


def test_figures_bars_displays_and_widgets_of_a_job(ranks):
    job = Job(
        ranks,
        "from IPython.display import HTML\nimport matplotlib.pyplot as plt\n%matplotlib inline\ntime.sleep(0.5)\n"
        "for i in range(4):\n    print(f'\\r{i} of 3', end='', flush=True); time.sleep(0.15)\nprint()\n"
        "handle = display(HTML('first'), display_id=True)\nif rank == 0: plt.plot([1, 2]); plt.show()\n"
        "handle.update(HTML('last'))\n"
        "bar = ipywidgets.IntProgress(value=3)\ndisplay(bar)",
    )
    reply = job.wait_for("is done")
    kinds = [kind for data in reply.displays for kind in data]
    assert kinds.count("image/png") == 1
    assert kinds.count("application/vnd.jupyter.widget-view+json") == 2
    assert [data["text/html"] for data in reply.displays if "text/html" in data] == ["last", "last"]
    assert "[0-1] 3 of 3" in reply.stdout and "2 of 3" not in reply.stdout


def test_cells_and_transfers_wait_in_order_and_say_so(ranks, tmp_path):
    go = tmp_path / "go"
    first = Job(ranks, f"while not os.path.exists({str(go)!r}): time.sleep(0.01)\nx = 1\nprint('first')")
    second = Job(ranks, "x += 1\nprint('second')", " --ranks 1")
    assert f"job {second.number} waits for job {first.number}; %ddp_wait" in second.began.stdout
    table = ranks.run("%ddp_jobs").stdout
    assert re.search(rf"{first.number} +In \[\d+\] +0-1 +running +\d+\.\d +while not os", table)
    assert re.search(rf"{second.number} +In \[\d+\] +1 +waits for job {first.number} ", table)
    message = ranks.start("print(session['x'])")
    said = (
        f"waiting until jobs {first.number} and {second.number} have ended, since cells and jobs run in turn. The stop "
        "button ends this wait and not them\n"
    )
    assert ranks.wait_for_text(said) == said
    go.touch()
    reply = ranks.finish(message)
    assert (reply.stdout, reply.stderr) == ("[0] 1\n[1] 2\n", "")
    first.wait_for("[0-1] first")
    second.wait_for("[1] second")


def test_a_stop_of_a_local_cell_or_of_a_wait_keeps_the_job(ranks):
    job = Job(ranks, "time.sleep(2)\nprint('whole')")
    for code, words in (
        ("import time\nprint('there')\ntime.sleep(60)", ""),
        ("print('there')\n%ddp_wait", f"interrupted: job {job.number} continues"),
        ("print('there')\nsession['kept']", f"interrupted: nothing was read, and job {job.number} continues"),
    ):
        message = ranks.client.execute(code, stop_on_error=False)
        ranks.wait_for_text("there")
        ranks.interrupt()
        stopped = ranks.finish(message)
        assert stopped.ename == "KeyboardInterrupt" and words in stopped.evalue, stopped
    result = ranks.run(f"result = await session.jobs[{job.number}]\nprint(result[1].stdout)")  # `%autoawait` is on
    assert result.stdout == "whole\n\n"
    job.wait_for("[0-1] whole")
    assert re.search(r"is done after \d+\.\d s\n$", ranks.run("%ddp_wait").stdout)
    assert ranks.run("%ddp_wait").stdout == "no job is left to wait for\n"


def test_a_failure_is_shown_under_the_cell_and_raised_by_a_wait(ranks):
    job = Job(ranks, "if rank: raise ValueError('no')\ndist.barrier()")
    reply = job.wait_until(lambda reply: reply.traceback)
    assert "--- rank 1 ---" in reply.traceback and "ValueError: no" in reply.traceback
    assert "rank 0 waited in barrier #" in reply.traceback
    job.wait_for("failed after")
    assert job.line.endswith(": RankError")
    waited = ranks.run("%ddp_wait")
    assert waited.ename == "RankError" and "ValueError: no (rank 1)" in waited.evalue
    assert ranks.run(f"%ddp_wait {job.number}").ename == "RankError", "whoever asks is told"
    assert ranks.run("%%on_all_ranks\ndist.barrier(); kept").stdout == "[0] 0\n[1] 1\n"


def test_a_deadlocked_job_is_detected_and_cancelled(ranks):
    job = Job(ranks, "if rank == 0: dist.barrier()\nelse: time.sleep(60)")
    reply = job.wait_until(lambda reply: any("no progress" in str(data) for data in reply.displays))
    [card] = [data["text/plain"] for data in reply.displays if "no progress" in str(data)]
    assert f"%ddp_cancel {job.number} ends the job; every variable is kept" in card
    assert ranks.run(f"%ddp_cancel {job.number}").stdout.startswith(f"job {job.number} was cancelled after ")
    reply = job.wait_for("rank 0 waited in barrier")
    assert "rank 1 was interrupted at cell line 2" in reply.stderr
    assert "was cancelled after" in job.line
    assert ranks.run("%%on_all_ranks\ndist.barrier(); kept").stdout == "[0] 0\n[1] 1\n"
    assert ranks.run("%ddp_wait").stdout.startswith(f"job {job.number} was cancelled after"), "which is no error"


def test_interrupt_ends_the_running_job_and_cancel_the_others(ranks):
    jobs = [Job(ranks, "time.sleep(60)") for _ in range(4)]
    first, second, third, last = (job.number for job in jobs)
    said = ranks.run("%ddp_interrupt").stdout
    assert said == (
        f"job {first} was ended on ranks 0,1; all variables are kept\n"
        f"jobs {second}, {third} and {last} come next: %ddp_cancel all ends all jobs\n"
    )
    assert ranks.run(f"%ddp_cancel {last}").stdout == f"job {last} was cancelled after 0.0 s\n"
    assert "was cancelled" in ranks.run("%ddp_cancel all").stdout
    assert ranks.run("print({job.state for job in session.jobs if job.number >= " + str(first) + "})").stdout == (
        "{'cancelled'}\n"
    )
    assert ranks.run("%ddp_cancel all").stdout == "no job is left to cancel\n"
    assert ranks.run("%%on_all_ranks\ndist.barrier(); kept").stdout == "[0] 0\n[1] 1\n"


def test_input_in_a_job_is_an_error_that_says_what_to_do(ranks):
    job = Job(ranks, "input('name? ')")
    reply = job.wait_until(lambda reply: reply.traceback)
    assert "input() can be answered only while the notebook waits for its cell: no --background" in reply.traceback


def test_the_monitor_comes_under_a_job(ranks):
    job = Job(ranks, "for step in range(30):\n    log(loss=1 / (step + 1)); time.sleep(0.1)")
    reply = job.wait_for("is done")
    pages = [data["text/html"] for data in reply.displays if "text/html" in data]
    assert len(pages) == 1 and "<svg" in pages[0] and "loss" in pages[0]


def test_a_recording_is_up_to_date_while_a_job_runs(ranks):
    ranks.run("recording = session.recording")
    job = Job(ranks, "log(early=1.0)\nprint('logged')\ntime.sleep(60)")
    job.wait_for("logged")
    assert ranks.run("print('early' in recording.metrics)").stdout == "True\n"
    assert " runs " in job.line
    ranks.run("%ddp_cancel all")


def test_what_cannot_be_is_said(ranks):
    for code, words in [
        ("%%on_all_ranks --background --here\n1", "--background does not wait for them"),
        ("%%on_ranks 5 --background\n1", "5"),
        ("%ddp_wait 700", "job 700 does not exist; known: job"),
        ("%ddp_wait one", "N must be a job number, got 'one'"),
        ("%ddp_cancel", "pass the number of a job; %ddp_jobs lists them"),
        ("%ddp_jobs 1", "%ddp_jobs takes no '1'"),
    ]:
        reply = ranks.run(code)
        assert reply.ename == "UsageError" and words in reply.evalue, reply


def test_the_end_of_the_session_ends_every_job_with_a_sentence(ranks):
    """Last, because it ends the ranks of the module."""
    jobs = [Job(ranks, "print('there')\ntry: time.sleep(60)\nfinally: print('tidy')") for _ in range(2)]
    jobs[0].wait_for("there")
    stopped = ranks.run("%ddp_stop")
    first, second = (job.number for job in jobs)
    assert re.fullmatch(
        rf"job {first} was cancelled after \d\.\d s: the session was stopped\n"
        rf"job {second} was cancelled after 0\.0 s: the session was stopped\nstopped 2 ranks\n",
        stopped.stdout,
    )
    assert "[0-1] tidy" in jobs[0].wait_for("the session was stopped").stdout
    jobs[1].wait_for("the session was stopped")
