"""Logged and watched values, the recording level, training on a single rank, and their magics."""

from __future__ import annotations

import json
import math
import threading
import time
from contextlib import closing
from functools import partial
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

import ddp_notebook
from ddp_notebook.errors import CellTimeoutError, RankError, UsageError
from ddp_notebook.rank.group.calls import DONE
from ddp_notebook.rank.group.recorder import Recorder
from ddp_notebook.rank.record import event_buffer as taping
from ddp_notebook.rank.record import flusher as draining
from ddp_notebook.rank.record.event_buffer import EventBuffer
from ddp_notebook.rank.record.flusher import Flusher
from ddp_notebook.rank.record.metrics import MetricLogger
from ddp_notebook.rank.record.resources import counts_faults
from ddp_notebook.records.codec import Batch
from ddp_notebook.run.cells.cell_options import what_to_record
from tests.conftest import wait_until
from tests.kernels import NotebookKernel

_TRAIN = """
from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)))
optimizer = torch.optim.Adam(model.parameters())
def step(x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()
"""


def units_of_last_cell(session: Any) -> dict[str, str]:
    """Return the units of the steps for each metric of the last cell."""
    cell = int(session.recording.rows("span")["cell"].max())
    return {name: metric.unit_of(cell) for name, metric in session.recording._metrics_of(cell).items()}


@pytest.fixture(scope="module")
def ranks(session) -> Any:
    session.run(_TRAIN, quiet=True)
    return session


def metrics_of(session: Any, code: str, **record: Any) -> dict[str, list[tuple[list[int], list[float]]]]:
    """Run a cell. Return the logged steps and values of each rank, by name."""
    before = {name: len(metric.values) for name, metric in session.recording.metrics.items()}
    session.run(code, quiet=True, record=what_to_record(**record))
    found: dict[str, list[tuple[list[int], list[float]]]] = {}
    for name, metric in session.recording.metrics.items():
        new = slice(before.get(name, 0), None)
        ranks, steps, values = metric.ranks[new], metric.steps[new], metric.values[new]
        if len(values):
            found[name] = [
                (steps[ranks == rank].tolist(), values[ranks == rank].tolist()) for rank in range(session.world_size)
            ]
    return found


# ---- log

NUMBERS = {
    "0.5": 0.5,
    "3": 3.0,
    "True": 1.0,
    "-0.0": -0.0,
    "float('nan')": math.nan,
    "float('-inf')": -math.inf,
    "2**80": 2.0**80,
    "__import__('fractions').Fraction(1, 4)": 0.25,
    "__import__('numpy').float32(1.5)": 1.5,
    "__import__('numpy').int64(7)": 7.0,
    "torch.tensor(2.5)": 2.5,
    "torch.tensor([2.5])": 2.5,
    "torch.tensor([[4]])": 4.0,
    "torch.tensor(True)": 1.0,
    "torch.tensor(1.5, dtype=torch.bfloat16)": 1.5,
    "torch.tensor(1.5, requires_grad=True) * 2": 3.0,
}


def test_log_takes_numbers_and_tensors_of_one_element(ranks):
    code = "\n".join(f"log(number{at}={number})" for at, number in enumerate(NUMBERS))
    found = metrics_of(ranks, code)
    for at, expected in enumerate(NUMBERS.values()):
        assert repr(found[f"number{at}"]) == repr([([0], [expected])] * 2), list(NUMBERS)[at]


BAD = {
    "log(x='text')": "log(x=...) takes a number or a tensor of one element, got str",
    "log(x=None)": "log(x=...) takes a number or a tensor of one element, got NoneType",
    "log(x=[1.0])": "log(x=...) takes a number or a tensor of one element, got list",
    "log(x=1j)": "log(x=...) takes a number or a tensor of one element, got complex",
    "log(x=10**400)": "log(x=...) takes a number or a tensor of one element, got int",
    "log(x=torch.ones(2, 3))": "log(x=...) takes a number or a tensor of one element, got shape (2, 3): "
    "log its .mean()",
    "log(x=torch.ones(0))": "log(x=...) takes a number or a tensor of one element, got shape (0,): log its .mean()",
    "log(x=torch.tensor(1j))": "log(x=...) takes a real number, got a complex tensor: log its .abs()",
    "log(x=1, step=1.5)": "log(step=...) takes a 64-bit integer, got 1.5",
    "log(x=1, step='1')": "log(step=...) takes a 64-bit integer, got '1'",
    f"log(x=1, step={2**63})": f"log(step=...) takes a 64-bit integer, got {2**63}",
    "log(0.5)": "log() takes only keyword arguments, as in log(loss=...), got 0.5",
}


@pytest.mark.parametrize("code", BAD)
def test_what_log_does_not_take(ranks, code):
    with pytest.raises(RankError) as raised:
        ranks.run(code, quiet=True)
    assert raised.value.result is not None
    assert raised.value.result[0].error == f"TypeError: {BAD[code]}"
    assert metrics_of(ranks, "log(after=1)") == {"after": [([0], [1.0])] * 2}, "and nothing else is lost"


def test_log_counts_optimizer_steps_unless_it_is_told_a_step(ranks):
    code = """
log(before=1)
for n in range(3):
    step(torch.randn(8, 4))
    log(by_itself=n + rank)
    log(told=n, step=10 * n)
    log(tensor=n, step=torch.tensor(n))
"""
    found = metrics_of(ranks, code)
    assert found["before"] == [([0], [1.0])] * 2
    assert found["by_itself"] == [([0, 1, 2], [rank + 0.0, rank + 1.0, rank + 2.0]) for rank in (0, 1)]
    assert found["told"] == [([0, 10, 20], [0.0, 1.0, 2.0])] * 2
    assert found["tensor"] == [([0, 1, 2], [0.0, 1.0, 2.0])] * 2


_MODEL = """
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)"""
_PLACES = {
    "after the forward": "{log}\nloss.backward()\noptimizer.step()",
    "after the backward": "loss.backward()\n{log}\noptimizer.step()",
    "after the optimizer's step": "loss.backward()\noptimizer.step()\n{log}",
}


@pytest.mark.parametrize("wrapper", ["DistributedDataParallel", "(lambda model: model)"])
@pytest.mark.parametrize("place", _PLACES)
def test_a_value_belongs_to_the_step_that_it_was_logged_in(ranks, place, wrapper):
    """At any place in a loop, a logged value has the step number of the bar in the monitor, and of its loop."""
    lines = _PLACES[place].format(log="log(loss=float(n))").splitlines()
    code = f"""
from torch.nn.parallel import DistributedDataParallel
model = {wrapper}(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for n in range(4):
    optimizer.zero_grad()
    loss = model(torch.ones(2, 4)).sum()
""" + "".join(f"    {line}\n" for line in lines)
    assert metrics_of(ranks, code)["loss"] == [([0, 1, 2, 3], [0.0, 1.0, 2.0, 3.0])] * 2
    last = ranks.recording.rows("span")["cell"].max()
    assert sorted({step.step for step in ranks.recording.steps(last)}) == [0, 1, 2, 3]


def test_a_value_from_before_the_loop_moves_no_later_one(ranks):
    code = (
        _MODEL
        + """
log(loss=9.0)
for n in range(3):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    log(loss=float(n))
"""
    )
    assert metrics_of(ranks, code)["loss"] == [([0, 0, 1, 2], [9.0, 0.0, 1.0, 2.0])] * 2


def test_a_watched_variable_that_is_also_logged_has_its_step(ranks):
    code = (
        _MODEL
        + """
for n in range(3):
    acc = float(n)
    loss = model(torch.ones(2, 4)).sum()
    log(acc=acc)
    loss.backward()
    optimizer.step()
"""
    )
    found = metrics_of(ranks, code, watch="acc")
    assert found["acc"] == [([0, 0, 1, 1, 2, 2], [0.0, 0.0, 1.0, 1.0, 2.0, 2.0])] * 2


def test_accumulated_gradients_are_counted_by_their_values(ranks):
    code = (
        _MODEL
        + """
for n in range(6):
    loss = model(torch.ones(2, 4)).sum()
    log(loss=float(n))
    loss.backward()
    if n % 2: optimizer.step()
"""
    )
    assert metrics_of(ranks, code)["loss"] == [(list(range(6)), [float(n) for n in range(6)])] * 2
    assert units_of_last_cell(ranks) == {"loss": "value"}, "the bars count three steps"


def test_each_step_of_several_optimizers_counts(ranks):
    """The first iteration of a GAN looks like steps of one optimizer, so the number of steps per iteration is not
    known."""
    code = (
        _MODEL
        + """
other = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)
for n in range(3):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    other.step()
    log(loss=float(n))
    log(given=float(n), step=n)
"""
    )
    found = metrics_of(ranks, code, watch="n")
    assert found["loss"] == [([1, 3, 5], [0.0, 1.0, 2.0])] * 2
    assert found["n"] == [(list(range(6)), [0.0, 0.0, 1.0, 1.0, 2.0, 2.0])] * 2
    assert units_of_last_cell(ranks) == {"loss": "optimizer step", "n": "optimizer step", "given": "step"}
    frame = ranks.recording.to_pandas("metric")
    assert set(frame["unit"][(frame["cell"] == frame["cell"].max()) & (frame["name"] == "loss")]) == {"optimizer step"}


def test_what_is_logged_every_second_step_and_in_an_evaluation(ranks):
    code = (
        _MODEL
        + """
for n in range(6):
    loss = model(torch.ones(2, 4)).sum()
    if n % 2:
        log(before=float(n))
    loss.backward()
    optimizer.step()
    if n % 2:
        log(after=float(n))
model.eval()
with torch.no_grad():
    model(torch.ones(2, 4))
log(accuracy=0.5)
"""
    )
    found = metrics_of(ranks, code)
    assert found["before"] == found["after"] == [([1, 3, 5], [1.0, 3.0, 5.0])] * 2
    assert found["accuracy"] == [([5], [0.5])] * 2, "of the last step"


def test_log_keeps_the_value_of_that_moment(ranks):
    found = metrics_of(ranks, "x = torch.zeros(())\nfor n in range(50): x += 1; log(now=x)\nx.fill_(-1)")
    assert found["now"] == [(list(range(50)), [float(n) for n in range(1, 51)])] * 2, "no optimizer steps: counted"


def test_log_from_threads(ranks):
    code = """
import threading
def many(n):
    for i in range(200): log(**{f"thread{n}": i})
threads = [threading.Thread(target=many, args=(n,)) for n in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
    found = metrics_of(ranks, code)
    for n in range(4):
        assert [values for _, values in found[f"thread{n}"]] == [[float(i) for i in range(200)]] * 2


@pytest.fixture
def logging_loop(monkeypatch):
    """Run a loop of `log` without a rank. Return the numbers of sent and dropped values, and the seconds."""
    passed_on = [0]

    class Maker:
        rank, late = 0, None

        def batch(self, records: Any, dropped: int = 0, resources: Any = None) -> Batch:
            time.sleep(0.02)
            passed_on[0] += len(records)
            return Batch(rank=0, stream=1, dropped=dropped)

    monkeypatch.setattr(taping, "_PATIENCE_S", 0.2)
    event_buffer, is_busy = EventBuffer({}), threading.Event()
    flusher = Flusher(event_buffer, Maker(), lambda data: None, is_busy.is_set)  # type: ignore[arg-type]
    flusher.start()
    metrics = MetricLogger(event_buffer, SimpleNamespace(on_step=[], has_several_optimizers=False), {})  # type: ignore[arg-type]

    def run(count: int, *, nobody_takes: bool = False) -> tuple[int, float]:
        is_busy.set() if nobody_takes else is_busy.clear()
        began_s = time.monotonic()
        for number in range(count):
            metrics.log(only=float(number))
        took_s = time.monotonic() - began_s
        if not nobody_takes:
            flusher.flush(10.0)
        return passed_on[0], took_s

    yield run
    flusher.close()


@pytest.mark.long
def test_a_loop_that_only_logs_waits_for_the_recorder(logging_loop):
    passed_on, _ = logging_loop(150_000)
    assert passed_on == 150_000


def test_large_records_do_not_displace_logged_values():
    """A loop has logged many values, and the training loop of the next cell starts before all are sent."""
    event_buffer = EventBuffer({})
    metrics = MetricLogger(event_buffer, SimpleNamespace(on_step=[], has_several_optimizers=False), {})  # type: ignore[arg-type]
    for number in range(5_000):
        metrics.log(loss=float(number))
    for _ in range(taping.MOST):
        event_buffer.put("large", is_large=True)
    assert event_buffer.dropped == 0 and len(event_buffer) == 5_000 + taping.MOST
    event_buffer.pop(5_000)
    for _ in range(10):
        event_buffer.put("large", is_large=True)
    assert len(event_buffer) == taping.MOST, "the oldest large ones are dropped"
    event_buffer.pop(taping.MOST)
    event_buffer.put("large", is_large=True)
    assert len(event_buffer) == 1


@pytest.mark.long
def test_a_logging_loop_continues_without_a_reader(logging_loop):
    _, took_s = logging_loop(120_000, nobody_takes=True)
    assert took_s < 60.0, "20,000 values would wait 0.2 s each"
    passed_on, _ = logging_loop(0)
    assert passed_on == 100_000


@pytest.mark.long
def test_nothing_of_a_loop_that_only_logs_is_dropped(make_session_alone):
    session = make_session_alone(2)
    session.run("for i in range(120_000): log(only=float(i))", quiet=True)
    assert not session.recording.dropped
    assert "dropped" not in repr(session.recording)


# ---- watch

_GLOBALS = """
acc, word, several = 0, "text", torch.ones(3)
for n in range(3):
    loss = step(torch.randn(8, 4)); acc += 1
kept = loss.item()
"""
_LOCALS = """
loss = 99.0  # of an earlier cell
def one_step(x):  # knows no loss of its own
    optimizer.step()
def train(n):
    seen = []
    for i in range(n):
        loss = torch.tensor(float(i), requires_grad=True)
        part = {"a": 1}
        one_step(None)
train(3)
"""


def test_watch_reads_the_cells_variables_after_each_step(ranks):
    found = metrics_of(ranks, _GLOBALS, watch="acc,loss,word,several,unknown")
    # `loss` is assigned after its step, so the value of the previous step is read.
    assert found["acc"] == [([0, 1, 2], [0.0, 1.0, 2.0])] * 2
    assert set(found) == {"acc", "loss"}, "what is no number is left out"
    assert "acc" not in metrics_of(ranks, _GLOBALS), "in that cell only"


def test_watch_reads_the_variables_of_the_cells_functions_first(ranks):
    assert metrics_of(ranks, _LOCALS, watch="loss") == {"loss": [([0, 1, 2], [0.0, 1.0, 2.0])] * 2}


def test_watch_in_a_thread_of_the_cell(ranks):
    code = """
import threading
acc, thread = 7, threading.Thread(target=lambda: optimizer.step())
thread.start()
thread.join()
"""
    assert metrics_of(ranks, code, watch="acc") == {"acc": [([0], [7.0])] * 2}


def test_the_packages_log_logs_in_a_cell_too(ranks):
    """A module imported by a script and a cell logs with it in both."""
    code = "from ddp_notebook import log as log_of_package\nlog_of_package(packaged=rank + 0.5)\n"
    code += "import ddp_notebook\nddp_notebook.log(packaged=2.0, step=7)"
    assert metrics_of(ranks, code) == {"packaged": [([0, 7], [0.5, 2.0]), ([0, 7], [1.5, 2.0])]}


def test_the_packages_log_does_nothing_in_the_notebook(ranks):
    before = set(ranks.recording.metrics)
    ddp_notebook.log(of_notebook=1.0)
    assert set(ranks.recording.metrics) == before


def test_watching_a_complex_number_breaks_no_training(ranks):
    assert metrics_of(ranks, "z, w = torch.tensor(1j), 1j\nstep(torch.randn(8, 4))", watch="z,w") == {}


@pytest.mark.parametrize(
    ("names", "code", "words"),
    [
        (
            "acc,losss",
            "acc = 1\nstep(torch.randn(8, 4))",
            "--watch losss recorded nothing: when an optimizer stepped, ",
        ),
        ("acc", "acc = 1", "--watch acc recorded nothing: no optimizer of torch.optim has stepped"),
    ],
)
def test_what_was_not_seen_of_what_was_to_be_watched_is_told(ranks, names, code, words):
    result = ranks.run(code, quiet=True, record=what_to_record(watch=names))
    assert f"ddp_notebook: {words}" in result[0].stderr


@pytest.mark.parametrize("names", ["1x", "a b", "a,,b", "loss.item()"])
def test_what_watch_does_not_take(names):
    with pytest.raises(UsageError, match=r"--watch takes names of variables, as in --watch loss,acc, got '"):
        what_to_record(watch=names)


def test_what_record_does_not_take(ranks):
    with pytest.raises(
        UsageError, match=r"^record must be RecordOptions, got dict: record=RecordOptions\(profile=True\)$"
    ):
        ranks.run("x = 1", record={"profile": True})
    with pytest.raises(UsageError, match=r"^the recording level must be off, meta, values or all, got 'none'$"):
        ranks.run("x = 1", record=ddp_notebook.RecordOptions(level="none"))


# ---- samples, resources


def test_samples_come_by_themselves(ranks):
    ranks.run("for n in (8, 16, 32): step(torch.randn(n, 4))", quiet=True)
    steps = [step for step in ranks.recording.steps(rank=1) if step.cell == ranks.recording.rows("span")["cell"].max()]
    assert [step.samples for step in steps] == [8, 16, 32]


def test_resources_once_a_second(ranks):
    began = len(ranks.recording.resources)
    wait_until(lambda: len(ranks.recording.resources) >= began + 6, timeout_s=8, what="three looks at two ranks")
    rows = ranks.recording.resources[-6:]
    host = psutil.virtual_memory()
    for rank in (0, 1):
        mine = rows[rows["rank"] == rank]
        rss_bytes = psutil.Process(ranks.ranks.pids()[rank]).memory_info().rss
        assert mine["rss_bytes"][-1] == pytest.approx(rss_bytes, rel=0.05)
        assert (mine["host_total_bytes"] == host.total).all()
        assert mine["host_used_bytes"][-1] == pytest.approx(host.total - host.available, rel=0.2)
        assert (mine["cpu_percent"] >= 0).all() and (mine["cpu_percent"] < 1000).all()
        assert (mine["gpu_allocated_bytes"] == -1).all()
        apart_s = (mine["time_ns"][1:] - mine["time_ns"][:-1]) / 1e9
        assert ((apart_s > 0.8) & (apart_s < 3)).all()


def test_the_processor_time_is_that_of_the_rank(ranks):
    ranks.run("import time\nuntil = time.monotonic() + 2.3 * rank\nwhile time.monotonic() < until: pass", quiet=True)
    rows = ranks.recording.resources[-6:]
    busy, idle = (rows[rows["rank"] == rank]["cpu_percent"] for rank in (1, 0))
    assert busy.max() > 10 + 3 * idle[-2:].min(), "also where the machine has other things to do"


def test_page_faults_are_counted(ranks):
    def counted() -> int:
        rows = ranks.recording.resources
        return int(rows["page_faults"][rows["rank"] == 1].max(initial=0))

    wait_until(counted, timeout_s=8, what="a look at rank 1")
    before, pages = counted(), 20_000
    ranks.run(
        "import mmap\n"
        f"memory = mmap.mmap(-1, {pages} * mmap.PAGESIZE)\n"
        "memory.madvise(mmap.MADV_NOHUGEPAGE)\n"
        f"for at in range({pages}): memory[at * mmap.PAGESIZE] = 1\n"
        "memory.close()",
        quiet=True,
    )
    wait_until(lambda: before + pages <= counted() < before + 2 * pages, timeout_s=8, what="its page faults")


@pytest.mark.parametrize(("env", "counts"), [({}, True), ({"MALLOC_TRIM_THRESHOLD_": "268435456"}, False)])
def test_page_faults_are_not_counted_if_malloc_was_configured(env, counts):
    assert counts_faults(env) == counts


# ---- how much is recorded


def _counts(session: Any) -> dict[str, int]:
    recording = session.recording
    return {table: len(recording.rows(table)) for table in ("call", "value", "span", "metric")}


def test_record_off_records_nothing_but_keeps_running_operations(ranks):
    ranks.record("off")
    try:
        ranks.run("pass", quiet=True)
        before = _counts(ranks)
        ranks.run("step(torch.randn(8, 4)); dist.barrier(); log(x=1); log(x='not looked at')", quiet=True)
        assert _counts(ranks) == before
        code = "import time\nif rank == 0: dist.all_reduce(torch.ones(3), op=dist.ReduceOp.MAX)\nelse: time.sleep(60)"
        with pytest.raises(CellTimeoutError, match=r"rank 0: waiting in all_reduce #\d+ of group default.*cell line 2"):
            ranks.run(code, timeout_s=1.0, quiet=True)
    finally:
        ranks.record("values")
    ranks.run("step(torch.randn(8, 4)); log(x=1)", quiet=True)
    after = _counts(ranks)
    assert all(after[table] > before[table] for table in before)


def test_meta_records_all_but_values(ranks):
    ranks.record("meta")
    try:
        ranks.run("pass", quiet=True)
        before = _counts(ranks)
        ranks.run("step(torch.randn(8, 4)); dist.barrier(); log(x=1)", quiet=True)
        after = _counts(ranks)
    finally:
        ranks.record("values")
    assert after["value"] == before["value"]
    assert all(after[table] > before[table] for table in ("call", "span", "metric"))


def test_levels_that_there_are_not(ranks):
    with pytest.raises(UsageError, match=r"^the recording level must be off, meta, values or all, got 'loud'$"):
        ranks.record("loud")


# ---- the rank's own thread


def test_a_flush_waits_for_a_batch_in_the_making():
    """The event buffer is empty at this time, and its records have not been sent."""
    sent: list[bytes] = []
    making, go_on = threading.Event(), threading.Event()

    class Slow:
        rank, late = 0, None

        def batch(self, records: Any, dropped: int = 0, resources: Any = None) -> Batch:
            if records:
                making.set()
                go_on.wait(5)
            return Batch(rank=0, stream=1, dropped=len(records))

    event_buffer = EventBuffer({})
    flusher = Flusher(event_buffer, Slow(), lambda data: sent.append(data), lambda: False)  # type: ignore[arg-type]
    event_buffer.put("a record")
    thread = threading.Thread(target=lambda: flusher._pass_on())
    thread.start()
    assert making.wait(5)
    threading.Timer(0.2, go_on.set).start()
    flusher._maker.batch = lambda *_: Batch(rank=0, stream=1)  # type: ignore[method-assign]  # nothing more
    flusher.flush()
    is_through = go_on.is_set()
    thread.join()
    assert is_through


@pytest.fixture
def lonely(monkeypatch):
    """Return the polls of a rank without a notebook. Its next poll is in an hour."""
    monkeypatch.setattr(draining, "_ALONE_S", 0.0)
    monkeypatch.setattr(draining, "_ALONE_LOOK_S", 3600.0)
    looks: list[Any] = []

    class Maker:
        rank, late = 0, None

        def batch(self, records: Any, dropped: int = 0, resources: Any = None) -> Batch:
            looks.extend([resources] * (resources is not None))
            return Batch(rank=0, stream=1)

    flusher = Flusher(EventBuffer({}), Maker(), lambda data: None, lambda: False)  # type: ignore[arg-type]
    flusher.start()
    yield monkeypatch, flusher, looks
    flusher.close()


@pytest.mark.slow
def test_an_idle_rank_polls_often_again_after_a_request(lonely):
    monkeypatch, flusher, looks = lonely
    monkeypatch.setattr(draining, "_ALONE_S", 60.0)
    flusher._asked_s -= 120
    flusher.on_asked(flush=False)
    wait_until(lambda: len(looks) >= 2, what="two looks")


@pytest.mark.slow
def test_an_idle_rank_polls_often_while_a_cell_runs(lonely):
    _, flusher, looks = lonely
    flusher.is_in_cell = True
    flusher._event_buffer.filled.set()  # like any record
    wait_until(lambda: len(looks) >= 2, what="two looks")


def test_a_rank_that_nobody_looks_at_looks_rarely(lonely):
    _, flusher, looks = lonely
    flusher.flush()
    looks.clear()  # the first poll is immediate
    flusher.flush()
    assert flusher._idle_s() == 3600.0 and not looks


def test_the_line_that_a_function_of_a_module_was_called_from(ranks, tmp_path):
    (tmp_path / "helper.py").write_text("import torch.distributed as dist\ndef add(x):\n    dist.all_reduce(x)\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import helper\nx = torch.ones(1)"
    code += 2 * "\nhelper.add(x)"
    ranks.run(code, quiet=True)
    sites = [call.site for call in ranks.recording.collectives(op="all_reduce", rank=0)[-2:]]
    assert sites == [f"helper.py:3 in add, from cell line {line}" for line in (3, 4)]


@pytest.fixture
def recorder():
    """Record a group of one rank in this process."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())  # type: ignore[attr-defined]
    made = Recorder()
    made.install()
    yield made
    made.remove()
    dist.destroy_process_group()


def test_a_call_on_the_tape_does_not_keep_its_tensors(recorder):
    event_buffer = recorder.event_buffer = EventBuffer({})
    for is_async in (False, True):
        x = torch.ones(1 << 20)
        storage = x.untyped_storage()
        work = dist.all_reduce(x, async_op=is_async)
        if work is not None:
            work.wait()
        del x, work
        wait_until(lambda one=storage: torch._C._storage_Use_Count(one._cdata) <= 1, what="the tensor is let go")
    assert len(event_buffer) == 2


@pytest.mark.parametrize(
    "first", ["with ExitStack() as s: s.callback(dist.all_reduce, x)", "no_grad()(dist.all_reduce)(x)"]
)
def test_a_line_is_the_users_whatever_was_around_the_call_before(ranks, first):
    """The distance to the user's frame is cached only if all frames in between are torch's own wrappers."""
    ranks.run(
        "from contextlib import ExitStack; from torch import no_grad; x = torch.ones(1)\n"
        f"{first}\n"
        "def inner(): dist.all_reduce(x)\n"
        "def outer(): inner()\n"
        "outer()"
    )
    site = ranks.recording.collectives(op="all_reduce", rank=0)[-1].site
    assert site == "cell line 3 in inner"


def test_a_call_whose_wait_timed_out_is_recorded_once(ranks):
    before = len(ranks.recording.collectives(op="all_reduce", rank=0))
    ranks.run(
        "import time; from datetime import timedelta\n"
        "if rank: time.sleep(1)\n"
        "w = dist.all_reduce(torch.ones(3), async_op=True)\n"
        "try: w.wait(timedelta(seconds=0.2)) if rank == 0 else w.wait()\n"
        "except RuntimeError: time.sleep(1.5)"
    )
    found = ranks.recording.collectives(op="all_reduce", rank=0)[before:]
    assert [one.state for one in found] == ["failed"]


def test_a_call_that_another_thread_forgets_is_left_once(recorder):
    """The call is finished while its caller still waits for the interpreter, or even before it has returned."""

    class Forgetful(EventBuffer):
        def issued(self, call: Any, work: Any) -> None:
            wait_until(work.is_completed)
            recorder.prune()
            super().issued(call, work)

    def forget(call: Any, _: Any) -> None:
        call.check = None  # a call that was not sent yet would stay
        recorder.prune()

    event_buffer = recorder.event_buffer = Forgetful({})
    recorder.guard = lambda call: setattr(call, "check", partial(forget, call))
    dist.all_reduce(torch.ones(1))
    work = dist.all_reduce(torch.ones(1), async_op=True)
    assert work is not None
    work.wait()
    left = event_buffer.pop(10)
    assert [(call.number, call.state) for call in left] == [(1, DONE), (2, DONE)]
    assert recorder.live == recorder.by_work == recorder.unwaited == {}


# ---- one rank alone

_BASELINE = """
import random, numpy
history, table, plain, generator = [1], {"a": 1}, torch.zeros(3), torch.Generator().manual_seed(5)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
class Trainer:
    def __init__(self):
        self.model = torch.nn.Linear(2, 2)
        self.optimizer = torch.optim.Adam(self.model.parameters())
trainer = Trainer()
"""
_TRAINING_CELL = """
new = 1
model.train()
for n in range(12):
    trainer.model(torch.ones(2)).sum().backward(); trainer.optimizer.step()
    value = float(step(torch.randn(8, 4, generator=generator)) * random.random() * numpy.random.rand())
    scheduler.step()
    history.append(value); table["a"] = value; table["b"] = n; plain.add_(value)
    gathered = [None, None]
    dist.all_gather_object(gathered, value)
    dist.barrier()
model.eval()
"""
_STATE = """
import random, numpy
def _plain(value):
    if isinstance(value, torch.Tensor): return [str(value.dtype), value.tolist()]
    if isinstance(value, dict): return [[key, _plain(one)] for key, one in value.items()]
    if isinstance(value, list | tuple): return [_plain(one) for one in value]
    return repr(value)
def _state():
    return {
        "parameters": _plain(model.state_dict()), "gradients": [_plain(one.grad) for one in model.parameters()],
        "of an object": [_plain(trainer.model.state_dict()), _plain(trainer.optimizer.state_dict())],
        "modes": [one.training for one in model.modules()],
        "optimizer": _plain(optimizer.state_dict()), "scheduler": _plain(scheduler.state_dict()),
        "torch": _plain(torch.get_rng_state()), "python": random.getstate(), "numpy": _plain(numpy.random.get_state()),
        "generator": _plain(generator.get_state()), "variables": _plain([history, table, plain, value, n, gathered]),
        "names": sorted(name for name in globals() if not name.startswith("_")),
    }
"""


@pytest.fixture(scope="module")
def trained(ranks) -> Any:
    ranks.run(_BASELINE, quiet=True)
    ranks.run(_TRAINING_CELL, quiet=True)
    return ranks


def test_a_baseline_leaves_everything_as_it_was(trained):
    trained.run(_STATE, quiet=True)
    trained.run("_before = _state()", quiet=True)
    epoch = trained.ranks.epoch
    trained.baseline(steps=14)
    trained.run("_differs = [name for name, one in _state().items() if one != _before[name]]", quiet=True)
    assert trained["_differs"] == {0: [], 1: []}
    trained.run("x = torch.ones(1); dist.all_reduce(x); step(torch.randn(8, 4)); dist.barrier()", quiet=True)
    assert [float(x) for x in trained["x"].values()] == [2.0, 2.0]
    assert trained.ranks.epoch == epoch, "the ranks are in step, and nothing had to be formed anew"
    recording = trained.recording
    alone, (aside,) = recording.baseline, recording.aside
    assert not [step for step in recording.steps() if step.cell == aside], "it is no training of the user's"
    recording.aside.clear()
    own = [step for step in recording.steps() if step.cell == aside]
    recording._set_aside(aside)
    assert len(own) == 7, "two optimizers step in each"
    assert {step.rank for step in own} == {0}
    assert min(step.duration_ns for step in own) <= alone["step_ns"] <= max(step.duration_ns for step in own)
    assert alone["world_size"] == 1 and alone["samples_per_s"] == pytest.approx(8 / alone["step_ns"] * 1e9)


@pytest.mark.long
def test_a_second_baseline_compares_with_the_training_too(trained):
    trained.run("for n in range(4): step(torch.randn(8, 4))", quiet=True)
    cell = trained.recording.steps(rank=0)[-1].cell
    for _ in range(2):
        trained.baseline(steps=4)
        assert trained.recording.baseline["cell"] == cell
        assert str(trained.report()).startswith(f"cell {cell}: ")


def test_a_cell_that_fails_alone_says_so_and_leaves_nothing(trained):
    trained.run("_left = iter([1, 0])", quiet=True)
    trained.run("step(torch.randn(8, 4))\nif next(_left) == 0: raise ValueError('not twice')", quiet=True)
    trained.run("_before = _plain(model.state_dict())", quiet=True)
    with pytest.raises(RankError, match="ValueError: not twice"):
        trained.baseline(steps=50)
    trained.run("x, same = torch.ones(1), _plain(model.state_dict()) == _before; dist.all_reduce(x)", quiet=True)
    assert float(trained["x"][0]) == 2.0, "operations are real again"
    recording = trained.recording
    assert {step.cell for step in recording.steps(rank=0)} == {step.cell for step in recording.steps(rank=1)}
    assert trained["same"] == {0: True, 1: True}


# ---- the magics, in a real notebook

_BAD_LINES = {
    "%ddp_record loud": "the recording level must be off, meta, values or all, got 'loud'",
    "%ddp_report": "",
    "%ddp_report --baseline": "no cell has run an optimizer step on rank 0: run the training cell first",
    "%ddp_report now": "unrecognized arguments: now\nusage: %ddp_report [--baseline]",
    "%ddp_trace": "the following arguments are required: FILE\nusage: %ddp_trace FILE",
    "%ddp_trace one two": "unrecognized arguments: two\nusage: %ddp_trace FILE",
    "%ddp_trace /nowhere/run.json": "the folder '/nowhere' for run.json does not exist; create it first",
    "%ddp_trace run.json": "nothing to write: nothing was recorded; run a cell on the ranks, with %ddp_record "
    "meta or values",
    "%%on_all_ranks --watch 1x\npass": "--watch takes names of variables, as in --watch loss,acc, got '1x'",
    "%%on_all_ranks --tensors some\npass": "argument --tensors: invalid choice: 'some'",
    "%%on_all_ranks --gradient\npass": "argument --gradient: expected one argument",
}
_NOTEBOOK_CELL = f"""%%on_all_ranks --watch loss --tensors full
{_TRAIN}
for n in range(8):
    loss = step(torch.randn(8, 4))
"""


@pytest.fixture(scope="module")
def notebook(session):
    session.stop()  # the tests of this module that need it have run
    with closing(NotebookKernel()) as kernel:
        kernel.run("%load_ext ddp_notebook")
        assert kernel.run("%ddp_record meta").ename == "NoSessionError"
        assert kernel.run("%ddp_start 2").status == "ok"
        yield kernel


@pytest.mark.long
@pytest.mark.parametrize("line", _BAD_LINES)
def test_lines_that_cannot_be(notebook, line):
    """Nothing has been recorded."""
    reply = notebook.run(line)
    if expected := _BAD_LINES[line]:
        assert reply.ename == "UsageError" and reply.evalue.startswith(expected), reply
    else:
        assert reply.status == "ok" and reply.stdout.startswith("No optimizer step was recorded. "), reply


def test_record_report_and_trace(notebook, tmp_path):
    for level, words in {
        "off": "ranks record nothing; %ddp_status still shows which rank waits where\n",
        "meta": "ranks record calls and their times, but no tensor values\n",
        "all": "ranks record calls, their times and all tensor values\n",
        "values": "ranks record calls, their times and tensor values; if steps are fast, of some steps only\n",
    }.items():
        for line in (f"%ddp_record {level}", "%ddp_record"):
            reply = notebook.run(line)
            assert (reply.status, reply.stdout) == ("ok", words)
        if level == "off":
            notebook.run("%%on_all_ranks\ndist.barrier()")
            assert notebook.run("%ddp_report").stdout.startswith("No optimizer step was recorded. ")
    assert notebook.run(_NOTEBOOK_CELL).status == "ok"
    number = int(notebook.run("print(len(In) - 2)").stdout)
    report = notebook.run("%ddp_report")
    assert report.stdout.startswith(f"In [{number}]: "), "as its reader knows the cell"
    assert "steps on 2 ranks" in report.stdout and "one rank alone" not in report.stdout, report
    compared = notebook.run("%ddp_report --baseline")
    assert "% of 2 times one rank alone" in compared.stdout, compared
    assert compared.stdout.split(":")[0] == report.stdout.split(":")[0], "of the same cell"

    path = tmp_path / "run.json"
    assert notebook.run(f"%ddp_trace {path}").stdout.endswith("B. Open it at https://ui.perfetto.dev\n")
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["name"] for event in events}
    assert {"all_reduce", "loss"} <= names and "aten::mul" not in names
    assert f"In [{number}]" in names

    for shape in (3, 5):
        profiled = notebook.run(f"%%on_all_ranks --profile\nx = torch.ones({shape}) * 2; dist.all_reduce(x)")
        assert (profiled.status, profiled.stderr) == ("ok", "")
    reply = notebook.run(f"%ddp_trace {path}")
    assert reply.stdout.endswith("B, with torch's profile of 2 ranks. Open it at https://ui.perfetto.dev\n")
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["pid"] for event in events if event["name"] == "aten::mul"} == {0, 1}, "on the process of its rank"
    assert _is_inside(events, "gloo:all_reduce", "all_reduce"), "on the clock of the others"
    limit = "import resource\nif rank: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))"
    assert "the profile is lost" in notebook.run(f"%%on_all_ranks --profile\n{limit}").stderr
    words = "B, with torch's profile of 1 rank, without that of rank 1, which is lost. Open it at "
    assert words in notebook.run(f"%ddp_trace {path}").stdout


def _is_inside(events: list[dict[str, Any]], inner: str, outer: str) -> bool:
    """Return whether each slice of that name is within one of the other name, with a tolerance of 2 ms."""
    outers = [event for event in events if event["name"] == outer and event["ph"] == "X"]
    inners = [event for event in events if event["name"] == inner and event["ph"] == "X"]
    return bool(inners) and all(
        any(
            one["pid"] == event["pid"]
            and one["ts"] - 2000 < event["ts"]
            and event["ts"] + event["dur"] < one["ts"] + one["dur"] + 2000
            for one in outers
        )
        for event in inners
    )


def test_what_a_notebook_watches_and_keeps(notebook):
    code = """
import ddp_notebook
recording = ddp_notebook.current().recording
call = recording.collectives(op="all_reduce", rank=0)[0]
print(recording.metrics["loss"].of_rank(1)[0].tolist(), recording.tensor(0, call.call, 1)[0].shape == call.shapes[0])
"""
    assert notebook.run(code).stdout == "[0, 1, 2, 3, 4, 5, 6, 7] True\n"
