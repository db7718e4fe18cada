"""Presses of stop at several moments of each command, in plain and kept sessions and with an attached torchrun job."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from ddp_notebook.magics import DDPMagics
from ddp_notebook.run.features import load
from tests.keep.conftest import runtime  # noqa: F401  # a fixture
from tests.kernels import NotebookKernel, Reply
from tests.torchrun.conftest import Jobs

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

_TRAIN = """%%on_all_ranks
x, kept = torch.ones(4, 3), rank
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(12):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    log(loss=loss)
"""
_OF_ALL = ["%ddp_status", "%ddp_report", "%ddp_monitor", "%ddp_peek kept", "%ddp_diff", "%ddp_nan"]
_OF_ALL += ["%ddp_forecast 8", "%ddp_trace run.json", "%ddp_help", "%ddp_help ddp_start"]
_OF_SESSIONS = [
    *_OF_ALL,
    *("%ddp_check", "%ddp_record values", "%ddp_memory", "%ddp_memory model(x).mean()", "%ddp_push value", "%ddp_whos"),
    *("%ddp_pull kept", "%ddp_pull kept --safe", "%ddp_fetch *.txt", "%ddp_jobs", "%ddp_cancel all", "%ddp_wait"),
    *("%ddp_fault off", "%ddp_auto off", "%ddp_heal", "%ddp_interrupt", "%ddp_sync", "%ddp_debug"),
    *("%ddp_verify model(x).mean() --batch x --model model", "%%ddp_twice\nkept = kept + 1", "%%local\n1"),
    *("%on_all_ranks kept", "%%on_all_ranks\nkept", "%%on_all_ranks --background\nkept", "%%on_ranks 0\nkept"),
    *("%ddp_attach", "session.client", "session.client[:].apply_sync(abs, -1)", "session.ranks.reform()"),
    *("%ddp_resize 3", "%ddp_resize 2", "repr(session)", "session.status()", "session['kept']"),
]
# These start or end all ranks: `tests/test_interrupted` and `tests/test_start` press during them.
_OTHERS = {"ddp_start", "ddp_restart", "ddp_stop", "ddp_torchrun"}
_PARTS = (0.05, 0.2, 0.4, 0.6, 0.8, 0.95)  # moments as parts of the usual duration


def test_every_command_is_interrupted():
    load()
    magics = {name for kind in DDPMagics.magics.values() for name in kind}
    assert magics - _OTHERS <= {line.split()[0].strip("%") for line in _OF_SESSIONS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture
def notebook(runtime, folder) -> Iterator[NotebookKernel]:  # noqa: F811
    env = {"XDG_RUNTIME_DIR": str(runtime), "DDP_NOTEBOOK_PRELOAD": "0"}
    with closing(NotebookKernel(env=env, pythonpath=str(Path(__file__).parents[2]))) as kernel:
        assert kernel.run(f"import os; os.chdir({str(folder)!r}); value = 5\n%load_ext ddp_notebook").status == "ok"
        yield kernel
        kernel.run("%ddp_stop", 60)


@pytest.mark.parametrize("keep", ["", " --keep 1"], ids=["plain", "kept"])
def test_a_press_during_a_command_shows_no_frames(notebook, tally, keep):
    assert notebook.run(f"%ddp_start 2{keep}").status == "ok"
    notebook.run("import ddp_notebook; session = ddp_notebook.current()")
    for _ in range(2):
        assert notebook.run(_TRAIN).status == "ok"
    _press_during(notebook, tally, _OF_SESSIONS, "%%on_all_ranks\ndist.barrier()", keep or "plain")


def test_a_press_with_an_attached_job_shows_no_frames(notebook, tally, tmp_path, runtime):  # noqa: F811
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(runtime))
        jobs = Jobs(tmp_path, stack)
        jobs.start("train(20)\nwait_for('end')")
        until = time.monotonic() + 60
        while notebook.run("%ddp_attach").status != "ok" and time.monotonic() < until:
            time.sleep(0.5)
        _press_during(notebook, tally, _OF_ALL, "%ddp_status", "torchrun")


def _press_during(notebook: NotebookKernel, tally, lines, check: str, what: str) -> None:
    usual = {line: notebook.run(line, 60) for line in lines}
    print({line: reply.evalue for line, reply in usual.items() if reply.status != "ok"})  # such as nothing to wait for
    lost: list[str] = []
    wrong: list[tuple[str, Reply]] = []
    for _ in tally(1, f"{len(lines)} commands, {len(_PARTS)} presses each, {what.strip()}: no frame of the package"):
        for line in lines:
            for part in _PARTS:
                if (reply := _press(notebook, line, part * usual[line].duration_s)) is None:
                    lost.append(line)
                elif "ddp_notebook/" in reply.traceback + reply.stderr or reply.ename not in {
                    *("", "KeyboardInterrupt", usual[line].ename)
                }:
                    wrong.append((line, reply))
                    print(wrong[-1])
        assert notebook.run(check, 60).status == "ok"
        assert not wrong
    print(f"presses that only the kernel got: {lost}")
    assert len(lost) < len(lines) * len(_PARTS) / 4


def _press(notebook: NotebookKernel, line: str, after_s: float) -> Reply | None:
    """Return the reply; None if the press hit code of the kernel between two cells, which then sends none."""
    message = notebook.start(line)
    # A press before the kernel has begun a cell is an error in the kernel, which then never replies.
    notebook.wait_under(message, lambda reply: reply.messages >= 2)
    time.sleep(after_s)
    notebook.interrupt()  # no effect if the command has ended
    try:
        return notebook.finish(message, 8)
    except (TimeoutError, queue.Empty):
        assert notebook.run("1").status == "ok"
        return None
