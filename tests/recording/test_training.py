"""Recorded training steps: in threads, of optimizers of all kinds, of ranks that train independently."""

from __future__ import annotations

import json
import re
import sys
import threading
from typing import Any

import numpy as np
import pytest

from ddp_notebook import RecordOptions
from ddp_notebook.observe.recording import Recording
from ddp_notebook.observe.report.report import apart
from ddp_notebook.observe.trace.trace import chrome_trace
from ddp_notebook.rank.group.call_site import CallSites
from ddp_notebook.rank.group.modules import Modules
from ddp_notebook.rank.record.batches import BatchMaker
from ddp_notebook.rank.record.event_buffer import EventBuffer
from ddp_notebook.rank.record.flusher import Flusher
from ddp_notebook.rank.record.training.buckets import Backward
from ddp_notebook.rank.record.training.spans import FORWARD, TrainingSpans
from ddp_notebook.records.codec import decode
from ddp_notebook.records.schema import SPANS
from tests.conftest import wait_until
from tests.observe.synthetic import Synthetic, simulate

_TRAIN = """
import threading
from torch.nn.parallel import DistributedDataParallel
def make(Optimizer=torch.optim.SGD, **options):
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 3))
    return model, Optimizer(model.parameters(), lr=0.1, **options)
def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def ranks(session) -> Any:
    session.run(_TRAIN, quiet=True)
    return session


def steps_of(session: Any, code: str) -> list[int]:
    """Run a cell. Return the number of steps of each rank, as counted by the report."""
    session.run(code, quiet=True)
    cell = int(session.recording.rows("span")["cell"].max())
    return [len(session.recording.steps(cell=cell, rank=rank)) for rank in range(session.world_size)]


# ---- threads


def test_steps_each_in_a_thread_of_its_own(ranks):
    code = """
model, optimizer = make()
for _ in range(20):
    thread = threading.Thread(target=step, args=(model, optimizer))
    thread.start()
    thread.join()
"""
    assert steps_of(ranks, code) == [20, 20]
    assert [one.compute_ns > 0 for one in ranks.recording.steps()[-40:]] == [True] * 40


def test_steps_in_several_threads_at_once(ranks):
    """No step is lost, and each has a different number."""
    code = """
def work():
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(50):
        step(model, optimizer)
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
    assert steps_of(ranks, code) == [200, 200]
    spans = ranks.recording.rows("span")
    for rank in (0, 1):
        mine = spans[(spans["cell"] == spans["cell"].max()) & (spans["rank"] == rank)]
        assert np.sort(mine["step"][mine["kind"] == SPANS.index("optimizer")]).tolist() == list(range(200))
        assert (mine["kind"] == SPANS.index("backward")).sum() == 200


# ---- optimizers of all kinds

_KINDS = {
    "derived": """
class Own(torch.optim.SGD):
    def step(self, closure=None): return super().step(closure)
model, optimizer = make(Own)""",
    "around another one": """
class Around(torch.optim.Optimizer):
    def __init__(self, params, lr): super().__init__(params, {}); self.inner = torch.optim.SGD(params, lr)
    def step(self, closure=None): self.inner.step(closure)
model = make()[0]
optimizer = Around(list(model.parameters()), 0.1)""",
    "around another one, which has raised": """
class Failing(torch.optim.SGD):
    def step(self, closure=None): 1 / 0 if self.fails else super().step()
class Around(torch.optim.Optimizer):
    def __init__(self, params, lr): super().__init__(params, {}); self.inner = Failing(params, lr)
    def step(self, closure=None): self.inner.step()
model = make()[0]
optimizer = Around(list(model.parameters()), 0.1)
optimizer.inner.fails = True
try: optimizer.step()
except ZeroDivisionError: optimizer.inner.fails = False""",
    "around another one, without torch's __init__": """
class Around(torch.optim.Optimizer):
    def __init__(self, inner): self.inner = inner
    def zero_grad(self): self.inner.zero_grad()
    def step(self): self.inner.step()
model, inner = make()
optimizer = Around(inner)""",
    "not torch's, around one that is": """
class Around:
    def __init__(self, inner): self.zero_grad, self.step = inner.zero_grad, inner.step
model, inner = make()
optimizer = Around(inner)""",
    "sharded": """
from torch.distributed.optim import ZeroRedundancyOptimizer
model, optimizer = make(ZeroRedundancyOptimizer, optimizer_class=torch.optim.SGD)""",
    "with a schedule": """
model, optimizer = make()
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)""",
    "copied": "import copy\nmodel, optimizer = copy.deepcopy(make())",
}


@pytest.mark.parametrize("kind", _KINDS)
def test_each_step_is_seen_once(ranks, kind):
    assert steps_of(ranks, f"{_KINDS[kind]}\nfor _ in range(5): step(model, optimizer)") == [5, 5]


@pytest.mark.parametrize("is_first_to_end", [True, False])
def test_overlapping_backwards_leave_no_current_one_at_the_end(is_first_to_end):
    """Distributed ones run in threads of RPC."""
    event_buffer, first, second = EventBuffer({}), Backward(1, []), Backward(2, [])
    event_buffer.enter(1, 1)
    for begun in (first, second):
        event_buffer.go_back(begun)
    for ended, left in ((first, second), (second, None)) if is_first_to_end else ((second, first), (first, None)):
        ended.end_ns = 1
        event_buffer.come_back(ended)
        assert event_buffer.backward is left


# ---- apart

_ALONE = """
def train_alone(steps):
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps): step(model, optimizer)
train_alone(3)
"""
_APART = "ranks 0-1 train apart: no gradient was averaged by a collective, send or receive. "
_UNWRAPPED = (
    "The parameters of the optimizer belong to no model in DistributedDataParallel. To train together, wrap the model, "
    "and call the wrapped one\n"
)


def test_ranks_that_train_apart_cause_one_line_in_the_report(ranks, capsys):
    ranks.run(_ALONE)
    assert capsys.readouterr().err == f"{_APART}{_UNWRAPPED}"
    ranks.run("train_alone(100)")
    assert capsys.readouterr().err.count("train apart") == 1
    ranks.run("train_alone(100)  # ddp: ok trains-apart")
    assert capsys.readouterr().err == ""
    ranks.run("train_alone(100)")
    assert str(ranks.recording.report()).count(f"R{_APART[1:]}") == 1


def test_what_was_sent_before_the_first_step_averages_nothing(ranks, capsys):
    """A model in DDP that is created in the same cell, and then called without DDP."""
    ranks.run(
        "dist.barrier()\n"
        "wrapped = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 3))\n"
        "optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)\n"
        "for _ in range(3): step(wrapped.module, optimizer)"
    )
    assert (err := capsys.readouterr().err).startswith("step 0: gradients of wrapped were not averaged"), err
    assert "Step 0: gradients of wrapped were not averaged" in (report := str(ranks.recording.report()))
    assert "train apart" not in err + report  # advice for models without DDP
    ranks.run("for _ in range(3): step(wrapped, optimizer)")
    assert "train apart" not in capsys.readouterr().err and "train apart" not in str(ranks.recording.report())


@pytest.mark.parametrize(
    "code",
    [
        "step(*make())\nstep(*make())",
        "train_alone(3)\ndist.barrier()",
        "if rank == 0: train_alone(3)",
        "thread = threading.Thread(target=train_alone, args=(3,)); thread.start(); thread.join()",
    ],
)
def test_ranks_that_do_not_train_or_send_something_get_none(ranks, code, capsys):
    ranks.run(_ALONE)
    capsys.readouterr()
    ranks.run(code)
    assert "train apart" not in capsys.readouterr().err
    assert "train apart" not in str(ranks.recording.report(cell=ranks.recording.rows("span")["cell"].max()))


@pytest.mark.parametrize("kind", ["torch's", "derived"])
def test_a_step_whose_gradients_an_earlier_cell_has_averaged(ranks, kind, capsys):
    code = _KINDS.get(kind, "model, optimizer = make()")
    ranks.run(f"{code}\nfor _ in range(2): step(model, optimizer)")
    for code in ("model(torch.ones(2, 4)).sum().backward()", "optimizer.step()", "optimizer.zero_grad()"):
        ranks.run(code)
    assert "train apart" not in capsys.readouterr().err
    ranks.run("optimizer.step()")  # without gradients, so nothing is trained
    assert capsys.readouterr().err == ""


def test_only_the_ranks_that_train_apart_are_named():
    run = Synthetic(4)
    for rank in range(4):
        for at in range(3):
            run.span(rank, "optimizer", "SGD", at * 10 + 1, at * 10 + 2)
    run.call(0, "all_reduce", 5, 6)
    assert apart(run, 1) == [1, 2, 3]


def test_rows_that_are_gone_prove_nothing():
    run = simulate(world_size=2, steps=5)
    assert apart(simulate(world_size=2, steps=5, cell=2, has_calls=False, into=run), 2) == [0, 1]
    simulate(world_size=2, steps=5, cell=3, into=run)
    calls = run.rows("call")
    run._tables["call"] = calls[calls["cell"] == 3]  # the oldest were dropped
    assert apart(run, 1) == apart(run, 2) == []
    run.dropped = {0: 1}
    run._tables["call"] = calls
    assert apart(run, 2) == []


# ---- records that fail


def test_a_record_that_fails_is_counted_and_keeps_its_texts():
    """A batch with a name that later records have too."""
    event_buffer, recording = EventBuffer({}), Recording(1)
    flusher = Flusher(
        event_buffer, BatchMaker(lambda: 0, lambda *_: ""), lambda data: recording._feed(decode(data)), lambda: False
    )
    training = TrainingSpans(event_buffer)
    for samples in (2**31, 8):  # the first one exceeds the range of its column
        training.put(FORWARD, "Net", 1, samples)
        flusher.flush()
    [row] = recording.rows("span")
    assert (recording.text(int(row["name"])), row["samples"]) == ("Net", 8)
    assert recording.dropped == {0: 1}


def test_a_failed_record_is_counted_and_shown_only_in_the_report(ranks, capsys):
    before = ranks.recording.dropped
    ranks.run("next(iter(torch.utils.data.DataLoader([torch.zeros(1).expand(2**31)], batch_size=None)))[0]")
    assert "rows were lost: some steps may be missing" in str(ranks.recording.report())
    ranks.run("pass")  # shows the output after the cell
    assert "Traceback" not in capsys.readouterr().err
    assert {rank: count - before.get(rank, 0) for rank, count in ranks.recording.dropped.items()} == {0: 1, 1: 1}


def test_a_trace_of_calls_whose_names_are_lost():
    run = simulate(world_size=2, steps=1)
    run.rows("call")["op"] = run.rows("call")["site"] = 0
    names = {event["name"] for event in chrome_trace(run)["traceEvents"]}
    assert "unknown operation (bucket 0)" in names


# ---- the profile of a cell


@pytest.fixture
def folder(ranks, tmp_path, monkeypatch) -> Any:
    """Return the folder of the session's profiles."""
    folder = tmp_path / "a {folder} of {0}"
    folder.mkdir()
    monkeypatch.setattr(ranks._cluster, "directory", str(folder))
    return folder


def test_a_profile_in_a_folder_with_braces(ranks, folder, tmp_path):
    assert ranks.run("x = torch.ones(3) * 2", quiet=True, record=RecordOptions(profile=True))[0].stderr == ""
    assert len(list(folder.iterdir())) == ranks.trace(tmp_path / "run.json") == 2


def test_a_profile_that_cannot_be_written_is_reported(ranks, folder, tmp_path):
    limit = "import resource\nif rank == 1: resource.setrlimit(resource.RLIMIT_FSIZE, (%s, resource.RLIM_INFINITY))\n"
    result = ranks.run(limit % 1000 + "x = torch.ones(3) * 2", quiet=True, record=RecordOptions(profile=True))
    ranks.run(limit % "resource.RLIM_INFINITY", quiet=True)
    assert result.ok and result[0].stderr == ""
    words = f"ddp_notebook: the profile is lost: it could not be written to {folder} "
    assert re.fullmatch(rf"{re.escape(words)}\([\d.]+ [kMGT]B are free\)\n", result[1].stderr)
    path = tmp_path / "run.json"
    assert ranks._write_trace(path) == ([0], [1])
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["pid"] for event in events if event["name"] == "aten::mul"} == {0}


def test_calls_of_autograd_threads_have_the_line_that_waits():
    """Autograd has a thread for each GPU, which has no frame of the user."""
    held, cells = threading.Lock(), {"<cell>": 3}
    namespace: dict[str, Any] = {"held": held}
    exec(compile("def work():\n    wait()\ndef wait():\n    held.acquire()", "<cell>", "exec"), namespace)
    held.acquire()
    thread = threading.Thread(target=namespace["work"])
    thread.start()
    assert thread.ident is not None
    wait_until(lambda: sys._current_frames()[thread.ident].f_code.co_name == "wait")
    site = CallSites(cells, Modules()).of_thread(thread.ident)
    held.release()
    thread.join()
    assert site[2] is not None and site[2].co_name == "wait" and site[4] is None

    event_buffer = EventBuffer(cells)
    backward = Backward(1, [])
    backward.thread, backward.site = -1, site
    event_buffer.backward = backward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(event_buffer._sites, "site", lambda depth: ("fsdp", None, None, 0, None, "blocks.0", 7))
        assert event_buffer.site(1) == ("fsdp", *site[1:5], "blocks.0", 7)
