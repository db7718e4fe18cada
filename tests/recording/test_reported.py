"""Reports on loaders, workers, evaluation, checkpoints and cores of real training runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PREPARE = """
import time
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
class Slow(Dataset):
    def __init__(self, pause): self.pause = pause
    def __len__(self): return 64
    def __getitem__(self, at):
        time.sleep(self.pause)
        return torch.randn(8)
def evaluate(how, is_eval):
    model.train(not is_eval)
    with how():
        for x in DataLoader(Slow(0.003), batch_size=16):
            model(x)
    model.train()
def train(loader, epochs, evaluates=False, saves="", how=torch.no_grad, is_eval=True):
    for epoch in range(epochs):
        for x in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        if evaluates:
            evaluate(how, is_eval)
        if saves:
            torch.save(model.state_dict(), saves)
model = DDP(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
"""


@pytest.fixture(scope="module")
def prepared(session):
    session.run(PREPARE, quiet=True)
    return session


def test_the_report_advises_num_workers_for_a_slow_loader(prepared):
    prepared.run("train(DataLoader(Slow(0.003), batch_size=8), 3)", quiet=True)
    found = prepared.report()
    assert found.overall is not None and found.overall.workers_ns == 0
    assert found.overall.share(found.overall.input_ns) > 0.2
    [advice] = [text for text in found.suggestions if "num_workers" in text]
    assert "DataLoader with num_workers" in advice and "DataLoader has num_workers=0 and takes" in advice


@pytest.mark.long
def test_worker_starts_per_epoch_cause_no_advice_of_more_workers(prepared):
    prepared.run("train(DataLoader(Slow(0), batch_size=16, num_workers=2), 6, evaluates=True)", quiet=True)
    found = prepared.report()
    assert found.overall is not None and found.overall.workers_ns > 0.3 * found.overall.step_ns
    assert found.overall.workers_ns <= found.overall.input_ns
    text = str(found)
    assert re.search(r"^  workers  ", text, re.MULTILINE)
    advice = " ".join(found.suggestions)
    assert (
        "persistent_workers=True in DataLoader(num_workers=2): its workers start again and end, in each of 6 " in advice
    )
    assert " 6 epochs of 4 batches, which takes " in advice
    assert "load in the background" not in advice, "the loader of the evaluation is not that of the steps"
    settings = {
        (int(row["workers"]), bool(row["is_persistent"]), int(row["batches"]))
        for row in prepared.recording.rows("loader")
        if row["cell"] == found.cell and row["workers"]
    }
    assert settings == {(2, False, 4)}


@pytest.mark.long
def test_rare_worker_starts_are_found_and_parts_add_up(prepared):
    """The mean leaves out the shortest and longest 5 % of the steps, which include all starts of workers."""
    prepared.run("other = DataLoader(Slow(0))\niter(other)", quiet=True)  # has the first name
    begins_slowly = "worker_init_fn=lambda _: time.sleep(0.2)"
    prepared.run(f"train(DataLoader(Slow(0), batch_size=1, num_workers=2, {begins_slowly}), 3)", quiet=True)
    found = prepared.report()
    assert found.overall is not None and found.outside is not None and found.all_steps == 192
    assert not found.overall.workers_ns, "the mean has none of the steps with a start"
    began = sum(ns for name, _, ns in found.outside.steps if name == "  start and end of workers")
    assert began > 3 * 0.2e9
    if found.taken is None or not found.taken.by_others:  # otherwise the verdict is about the cores
        assert " is the start and the end of the data loader's workers, in 3 of 192 steps" in found.verdict
    advice = " ".join(found.suggestions)
    assert (
        "persistent_workers=True in DataLoader(num_workers=2): its workers start again and end, in each of 3 epochs of "
        "64 batches, which takes "
    ) in advice
    assert sum(found.outside.whole_ns) == pytest.approx(found.outside.cell_ns, rel=1e-6)


def test_evaluation_and_checkpoints_have_rows_and_are_in_no_step(prepared, tmp_path):
    prepared.run(
        f"train(DataLoader(Slow(0), batch_size=8), 3, evaluates=True, saves='{tmp_path}/' + str(rank))", quiet=True
    )
    found = prepared.report()
    assert found.all_steps == 24 and found.outside is not None
    rows = {name: (times, ns) for name, times, ns in found.outside.rows}
    assert rows["evaluation"][0] == 3 and rows["evaluation"][1] > 3 * 0.19 * 1e9, "64 samples take 0.19 s"
    assert rows["checkpoints"][0] == 3
    steps = prepared.recording.steps(found.cell, 0)
    assert sorted(step.duration_ns for step in steps)[-4] < 0.19e9, "no step has an evaluation in it"
    whole = sum(step.duration_ns for step in steps) + sum(ns for _, ns in rows.values())
    assert whole == pytest.approx(found.outside.cell_ns, rel=0.15)


@pytest.mark.parametrize(
    "how",
    ["how=torch.no_grad, is_eval=False", "how=torch.inference_mode, is_eval=False", "how=torch.enable_grad"],
)
def test_forwards_of_an_evaluation_are_no_steps_in_any_mode(prepared, tmp_path, how):
    saves = f"saves='{tmp_path}/' + str(rank)"
    prepared.run(f"train(DataLoader(Slow(0), batch_size=8), 3, evaluates=True, {saves}, {how})", quiet=True)
    found = prepared.report()
    assert found.all_steps == 24 and found.outside is not None
    rows = {name: (times, ns) for name, times, ns in found.outside.rows}
    assert rows["evaluation"][0] == 3 and rows["evaluation"][1] > 3 * 0.19 * 1e9, "64 samples take 0.19 s"
    assert rows["checkpoints"][0] == 3
    assert max(step.duration_ns for step in prepared.recording.steps(found.cell)) < 0.19e9
    assert sum(found.outside.whole_ns) == pytest.approx(found.outside.cell_ns, rel=1e-6)


@pytest.mark.long
def test_time_without_a_core_is_counted(prepared):
    if not Path("/proc/self/schedstat").exists():
        pytest.skip("this system counts nothing")
    burning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
    try:
        prepared.run(
            "big = DDP(torch.nn.Linear(600, 600))\n"
            "steps = torch.optim.SGD(big.parameters(), 0.01)\n"
            "for _ in range(100):\n"
            "    big(torch.randn(2000, 600)).mean().backward(); steps.step()\n",
            quiet=True,
        )
    finally:
        for one in burning:
            one.kill()
            one.wait()
    found = prepared.report()
    assert found.taken is not None and found.taken.share > 0.15 and found.taken.by_others
    assert re.fullmatch(
        r"On average, a rank had no free core for [\d.]+ m?s of [\d.]+ m?s: other processes used "
        r"[\d.]+ of the \d+ cores",
        found.verdict,
    )
    assert str(found).splitlines()[1] == f"{found.verdict}."
