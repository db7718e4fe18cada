"""Preemption of a machine: loops save the same step on all ranks, and another session resumes from it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time

import pytest

from ddp_notebook.errors import RankError, UsageError
from ddp_notebook.launch import preemption, start_line
from ddp_notebook.launch.direct import DirectCluster
from ddp_notebook.launch.preemption import Preemption
from ddp_notebook.launch.process import Processes
from tests.conftest import wait_until
from tests.test_survive import SETUP, STATE

LOOP = """
for step in ddp_notebook.survive(model, optimizer, scheduler, loader, losses, steps=20, resume={folder!r}):
    with step:
        train()
        if int(step) == {pause} and rank == 0: print("at step", int(step), flush=True)
        if int(step) >= {pause}: time.sleep(0.2)
"""


@pytest.fixture(scope="module")
def undisturbed(session) -> list[str]:
    session.run(SETUP, quiet=True)
    session.run(LOOP.format(folder="", pause=20), quiet=True, timeout_s=60)
    result = session.run(STATE, quiet=True)
    return [result[rank].result for rank in (0, 1)]


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.long)])
def test_a_signal_to_the_kernel(undisturbed, make_kernel, make_session_alone, tmp_path, number):
    kernel, folder = make_kernel(), str(tmp_path / "saved")
    kernel.run("%load_ext ddp_notebook")
    kernel.run(f"%ddp_start 2 --live off --on-preempt save {folder}")
    assert kernel.run(f"%%on_all_ranks\n{SETUP}").status == "ok"
    cell = kernel.start("%%on_all_ranks\n" + LOOP.format(folder=folder, pause=7))
    kernel.wait_for_text("at step 7")
    os.kill(kernel.pid, number)

    reply = kernel.finish(cell)

    assert reply.status == "error" and "PreemptedError: the machine will be preempted" in reply.evalue
    [step] = re.findall(rf"saved their state before step (\d+) to {re.escape(folder)}/step-\1", reply.evalue)
    assert 8 <= int(step) < 20 and f"steps=20, resume='{folder}'" in reply.evalue
    assert kernel.run("%on_all_ranks len(losses)").stdout.strip() == f"[0-1] {step}"  # the kernel can still run cells
    saved = kernel.run("%on_all_ranks ' '.join(float(p.sum()).hex() for p in model.parameters())").stdout

    session = make_session_alone(2)
    session.run(SETUP + LOAD.format(path=f"{folder}/step-{step}"), quiet=True)
    assert session.run("found", quiet=True)[1].result in saved
    session.run(SETUP, quiet=True)
    session.run(LOOP.format(folder=folder, pause=20), timeout_s=60)
    result = session.run(STATE, quiet=True)
    assert [result[rank].result for rank in (0, 1)] == undisturbed


LOAD = """
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
its_model, its_optimizer = get_state_dict(model, optimizer)
checkpoint.load({{"model": its_model, "optimizer": its_optimizer}}, checkpoint_id={path!r})
set_state_dict(model, optimizer, model_state_dict=its_model, optim_state_dict=its_optimizer)
found = ' '.join(float(p.sum()).hex() for p in model.parameters())
"""


def test_a_file_in_the_folder_and_other_ranks_then(make_session_alone, tmp_path, capsys):
    session = make_session_alone(2, on_preempt=str(tmp_path))
    session.run(SETUP, quiet=True)
    (tmp_path / "preempt").touch()
    with pytest.raises(RankError, match=r"saved their state before step \d+"):
        session.run(LOOP.format(folder=str(tmp_path), pause=1), timeout_s=60)
    assert "survive: nothing was saved in" in capsys.readouterr().err
    step = int(session.run("len(losses)", quiet=True)[0].result)
    wanted = session.run("[float(p.sum()).hex() for p in model.parameters()]", quiet=True)[0].result
    session.stop()

    session = make_session_alone(3, on_preempt=str(tmp_path))
    session.run(SETUP, quiet=True)
    loop = LOOP.format(folder=str(tmp_path), pause=20).replace("steps=20", f"steps={step}")
    session.run(loop, timeout_s=60)
    assert "it was saved by 2 ranks, and 3 are running now: random numbers" in capsys.readouterr().err
    found = session.run("[float(p.sum()).hex() for p in model.parameters()]", quiet=True)
    assert {found[rank].result for rank in range(3)} == {wanted}


@pytest.mark.long
def test_without_a_loop_it_says_that_nothing_is_saved(make_kernel, tmp_path):
    kernel = make_kernel()
    kernel.run("%load_ext ddp_notebook")
    kernel.run(f"%ddp_start 2 --live off --on-preempt save {tmp_path}")
    cell = kernel.start("%%on_all_ranks\nimport time\nprint('here', flush=True)\ntime.sleep(1)")
    kernel.wait_for_text("here")
    os.kill(kernel.pid, signal.SIGTERM)
    words = "SIGTERM came. Nothing is saved, because no rank is in a loop of survive()"
    assert words in kernel.wait_for_text(words)
    assert kernel.finish(cell).status == "ok" and not list(tmp_path.glob("step-*"))
    assert kernel.run("%ddp_stop").status == "ok"


def test_what_cannot_be_asked_for():
    with pytest.raises(UsageError, match=r"--on-preempt must be save DIR, got mail"):
        start_line.parse("2 --on-preempt mail x")
    assert start_line.parse("2 --on-preempt save x").on_preempt == "x"


def test_a_folder_that_cannot_be_made_is_said_with_its_name():
    asked = Preemption("/proc/nothere", DirectCluster.__new__(DirectCluster), lambda: False)
    with pytest.raises(UsageError, match=r"--on-preempt save /proc/nothere: .*; name a folder that can be written to"):
        asked.begin()


@contextlib.contextmanager
def as_somebody_else():
    """Run without the rights of root, which may read every folder."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_an_unreadable_folder_does_not_block_preemption_signals(tmp_path, monkeypatch):
    monkeypatch.setattr(preemption, "_LOOK_S", 0.01)
    said: list[str] = []
    cluster = DirectCluster.__new__(DirectCluster)
    cluster._processes = Processes()
    heard = Preemption(str(tmp_path / "shut" / "saved"), cluster, lambda: False, said.append)
    heard.begin()
    (tmp_path / "shut").chmod(0)
    try:
        with as_somebody_else():
            time.sleep(0.2)  # the folder is read repeatedly
            heard.hear("SIGTERM came")
            wait_until(lambda: said)
    finally:
        (tmp_path / "shut").chmod(0o700)
        heard.end()
    assert said[0].startswith("SIGTERM came. Nothing is saved")
