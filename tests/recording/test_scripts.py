"""Recording without a notebook: under torchrun, with and without `-m ddp_notebook.record`, and how ranks end."""

from __future__ import annotations

import subprocess
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import ddp_notebook
from ddp_notebook.__main__ import main
from ddp_notebook.rank.script import program
from tests.recording.scripts import ENDINGS, environment, is_clean, run_endings

_LOGGING = """
import ddp_notebook
import os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
def train():
    loader = torch.utils.data.DataLoader(torch.randn(12, 4), batch_size=4, num_workers=WORKERS)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in loader:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        ddp_notebook.log(loss=loss, rank=dist.get_rank())
dist.init_process_group("gloo")
train()
x = torch.full((3,), float(dist.get_rank() + 1))
dist.all_reduce(x)
dist.destroy_process_group()
"""


def _torchrun(records: Path | None, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments]
    return subprocess.run(command, env=environment(records), capture_output=True, text=True, timeout=100)


def _check(records: Path) -> None:
    recording = ddp_notebook.load(records)
    assert recording.world_size == 2 and recording.dropped == {}
    for rank in (0, 1):
        steps, values = recording.metrics["rank"].of_rank(rank)
        assert (steps.tolist(), values.tolist()) == ([0, 1, 2], [float(rank)] * 3)
        *_, last = recording.collectives(op="all_reduce", rank=rank)
        assert last.input is not None and last.output is not None
        assert (last.input.first.tolist(), last.output.first.tolist()) == ([rank + 1.0] * 3, [3.0] * 3)
        assert last.site == "train.py:18 in <module>" and last.origin == "user"
        assert [one.origin for one in recording.collectives(op="all_reduce", rank=rank)].count("ddp") == 3
    assert [step.samples for step in recording.steps(rank=1)] == [4, 4, 4]
    assert len(recording.resources) >= 2
    assert repr(recording.report()).startswith("Report(script, 3 steps"), "it has no cells"
    assert [run.label for run in recording.runs()] == ["script"]


@pytest.mark.long
def test_torchrun(tmp_path):
    """The worker of the loader is a fork, which records nothing."""
    path, records = tmp_path / "train.py", tmp_path / "runs" / "a"
    path.write_text(_LOGGING.replace("WORKERS", "1"))
    ran = _torchrun(records, str(path))
    assert ran.returncode == 0, ran.stderr
    assert len(list(records.glob("rank*.ddp"))) == 2
    _check(records)


_TRAINS = """
import sys, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
def train(bad_step):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(480, 64))
    loader = DataLoader(data, 8, sampler=DistributedSampler(data, shuffle=False))
    net = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 64))
    model = DistributedDataParallel(net, bucket_cap_mb=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, (x,) in enumerate(loader):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        if step == bad_step and dist.get_rank() == 1:
            loss = loss * float("nan")
        time.sleep(0.02)
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()
train(int(sys.argv[1]))
"""


@pytest.mark.long
def test_recordings_of_scripts_give_the_same_answers(tmp_path, capsys):
    """`%ddp_nan`, `%ddp_diff` and `%ddp_forecast` need no ranks and no notebook."""
    path = tmp_path / "train.py"
    path.write_text(_TRAINS)
    for folder, bad_step in (("before", "-1"), ("after", "12")):
        ran = _torchrun(tmp_path / folder, "-m", "ddp_notebook.record", str(path), bad_step)
        assert ran.returncode == 0, ran.stderr
    before, after = (ddp_notebook.load(tmp_path / folder) for folder in ("before", "after"))

    assert not before.first_nan().is_found
    nan = after.first_nan()
    assert nan.is_found and nan.ranks == (1,) and nan.step is not None and 12 <= nan.step <= 13, nan
    if nan.is_exact:
        assert "rank 1 loaded 8 samples from 193 to 207 in steps of 2 in step 12" in nan.sentence

    found = before.compare(after)
    assert found.direction.startswith("Changes from A, the base (script), to B (the other recording")
    assert found.numbers.first is not None and found.numbers.first.step in (12, 13), found
    assert main(["diff", str(tmp_path / "before"), str(tmp_path / "after")]) == 0
    assert capsys.readouterr().out.startswith(
        "Changes from A, the base (before), to B (after).\nA: before, 30 steps on 2"
    )

    assert str(before.forecast([2, 8])).splitlines()[0]


@pytest.mark.long
def test_torchrun_of_a_script_that_knows_nothing_of_it(tmp_path):
    path, records = tmp_path / "train.py", tmp_path / "runs"
    path.write_text(
        "import sys, torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\nprint(sys.argv)"
    )
    ran = _torchrun(records, "-m", "ddp_notebook.record", str(path), "--lr", "0.1")
    # Both write to one pipe, and a line may end after that of the other.
    assert (ran.returncode, ran.stdout.count(str([str(path), "--lr", "0.1"]))) == (0, 2), ran
    assert [call.op for call in ddp_notebook.load(records).collectives()] == ["barrier", "barrier"]


@pytest.mark.processes
def test_without_a_script():
    for arguments in ([], ["-m"]):
        command = [sys.executable, "-m", "ddp_notebook.record", *arguments]
        ran = subprocess.run(command, env=environment(None), capture_output=True, text=True, timeout=60)
        usage = "usage: DDP_NOTEBOOK_RECORD=DIRECTORY python -m ddp_notebook.record [-m] SCRIPT [ARGUMENT ...]\n"
        assert (ran.returncode, ran.stderr) == (1, usage)


@pytest.mark.processes
def test_without_the_variable_nothing_is_recorded(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("import ddp_notebook, sys\nddp_notebook.log(x=1)\nprint('torch' in sys.modules)")
    command = [sys.executable, "-m", "ddp_notebook.record", str(path)]
    ran = subprocess.run(command, env=environment(None), capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "False\n", "")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.long
def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    command = [sys.executable, "-m", "ddp_notebook.record", "nothing.py"]
    env = environment(tmp_path / "file" / "runs")
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 1 and "NotADirectoryError" in ran.stderr and "runs" in ran.stderr


@pytest.fixture(scope="module")
def endings(tmp_path_factory):
    directory = tmp_path_factory.mktemp("endings")
    return directory, run_endings(directory, list(ENDINGS))


@pytest.mark.long
@pytest.mark.parametrize("how", ENDINGS)
def test_every_rank_ends(endings, how):
    directory, ended = endings
    assert is_clean(ended[how], ENDINGS[how]), ended[how]
    recording = ddp_notebook.load(directory / how)
    assert [len(recording.steps(rank=rank)) for rank in (0, 1)] == [2, 2], "and all is in the files"


def test_a_traceback_has_no_frame_of_this_package():
    names: dict[str, Any] = {}
    exec(compile("def call(function): return function()", str(Path(program.__file__)), "exec"), names)
    with pytest.raises(ValueError, match="invalid literal") as of_script:
        names["call"](partial(int, "x"))  # raised in C, like by torch
    found = traceback.extract_tb(program._without_ours(of_script.tb))
    assert [frame.filename for frame in found] == [__file__]
