"""Recording never changes the user's program, and an invalid record does not affect others."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ddp_notebook.rank.group.sequences import Moment
from ddp_notebook.rank.record.batches import BatchMaker
from ddp_notebook.rank.record.event_buffer import EventBuffer
from ddp_notebook.rank.record.flusher import Flusher
from ddp_notebook.rank.record.metrics import LoggedValue
from ddp_notebook.rank.record.resources import Resources
from ddp_notebook.rank.remote_calls import Ran
from ddp_notebook.records.codec import decode, encode
from ddp_notebook.run.cells.cell_options import what_to_record
from tests.conftest import wait_until


@pytest.fixture(scope="module")
def ranks(session) -> Any:
    session.run("import threading, time\nothers = dist.new_group([0, 1])", quiet=True)
    return session


def new_calls(session: Any, code: str) -> np.ndarray:
    """Run a cell. Return the rows of its calls."""
    session.run(code, quiet=True, record=what_to_record())
    rows = session.recording.rows("call")
    return rows[rows["cell"] == rows["cell"].max()]


def test_a_collective_of_a_thread_outlives_its_cell(ranks):
    ranks.run(
        """
go, told = threading.Event(), []
def work():
    try:
        if rank: go.wait(20)
        x = torch.ones(4)
        dist.all_reduce(x, group=others)
        told.append(float(x[0]))
    except BaseException as error:
        told.append(repr(error))
thread = threading.Thread(target=work, daemon=True)
thread.start()
if rank == 0: time.sleep(0.2)  # until it waits for the other one
""",
        quiet=True,
    )
    ranks.run("go.set(); thread.join(20)", quiet=True)
    assert ranks["told"] == {0: [2.0], 1: [2.0]}


def test_collectives_of_a_thread_are_recorded_across_cells(ranks):
    before = len(ranks.recording.rows("call"))
    ranks.run(
        "def loop():\n"
        "    for _ in range(300): dist.all_reduce(torch.ones(4), group=others); time.sleep(0.001)\n"
        "thread = threading.Thread(target=loop, daemon=True); thread.start()",
        quiet=True,
    )
    for _ in range(20):
        ranks.run("pass", quiet=True)
    ranks.run(
        "from ddp_notebook.rank.engine import RankEngine\n"
        "thread.join(30); under_way = len(RankEngine.instance()._rank._network.recorder.operations())",
        quiet=True,
    )
    assert ranks["under_way"] == {0: 0, 1: 0}
    assert len(ranks.recording.rows("call")) - before == 600


def test_watching_leaves_the_users_locals_alone(ranks):
    ranks.run(
        """
parameter = torch.nn.Parameter(torch.ones(1))
sgd = torch.optim.SGD([parameter], lr=0.1)
def train():
    rate, loss = 0.1, 1.0
    config = locals()
    parameter.grad = torch.ones(1)
    sgd.step()
    return config
rate = train().get("rate")
""",
        quiet=True,
        record=what_to_record(watch="loss"),
    )
    assert ranks["rate"] == {0: 0.1, 1: 0.1}


def test_a_group_of_numpys_ranks(ranks):
    calls = new_calls(
        ranks,
        "import numpy as np\n"
        "numbered = dist.new_group(np.array([0, 1]))\n"
        "dist.all_reduce(torch.ones(3), group=numbered); dist.all_reduce(torch.ones(3))",
    )
    assert len(calls) == 4


def test_a_type_that_torch_can_only_carry_costs_no_other_record(ranks):
    calls = new_calls(
        ranks,
        "for _ in range(5): dist.all_reduce(torch.ones(3))\n"
        "odd = torch.zeros(4, dtype=torch.uint8).view(torch.bits8)\n"
        "dist.send(odd, 1) if rank == 0 else dist.recv(odd, 0)",
    )
    assert [len(calls[calls["rank"] == rank]) for rank in (0, 1)] == [6, 6]


def test_nested_tensors_of_a_loader(ranks):
    ranks.run(
        "import warnings; warnings.simplefilter('ignore')\n"
        "sizes = []\n"
        "for batch in torch.utils.data.DataLoader([torch.ones(2), torch.ones(3)], 2,\n"
        "                                         collate_fn=lambda some: torch.nested.nested_tensor(some)):\n"
        "    sizes.append(batch.size(0))",
        quiet=True,
    )
    assert ranks["sizes"] == {0: [2], 1: [2]}


def test_a_layer_that_is_frozen_after_ddp_has_taken_it(ranks):
    ranks.run(
        """
from torch.nn.parallel import DistributedDataParallel
layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
model = DistributedDataParallel(layers, static_graph=True)
layers[0].weight.requires_grad_(False)
for _ in range(3): model(torch.ones(2, 4)).sum().backward()
""",
        quiet=True,
    )
    step = max(ranks.recording.rows("span")["span"])
    assert step, "the passes were recorded"
    layout = ranks.recording.rows("layout")[-1]
    assert "1.weight" in ranks.recording.text(int(layout["buckets"]))


def test_a_loop_that_logs_faster_than_batches_loses_nothing(ranks):
    before, dropped = len(ranks.recording.rows("metric")), sum(ranks.recording.dropped.values())
    ranks.run("for number in range(10_000): log(number=number)", quiet=True)
    assert len(ranks.recording.rows("metric")) - before == 20_000
    assert sum(ranks.recording.dropped.values()) == dropped


def test_a_send_whose_work_nobody_keeps_has_a_row(ranks):
    calls = new_calls(
        ranks,
        "x = torch.ones(2)\nif rank == 0: dist.isend(x, 1)\nelse: dist.recv(x, 0)\ndist.barrier()",
    )
    names = [ranks.recording.text(int(number)) for number in calls[calls["rank"] == 0]["op"]]
    assert sorted(names) == ["barrier", "send"]


def test_large_complex_numbers_are_finite(ranks):
    ranks.run("x = torch.full((1,), 1e200, dtype=torch.complex128)\ndist.broadcast(x, 0)", quiet=True)
    preview = ranks.recording.collectives("broadcast", rank=0)[-1].input
    assert preview.infs == 0 and preview.high == pytest.approx(1e200)


@pytest.mark.slow
def test_a_record_is_sent_if_an_interrupt_prevented_the_wakeup():
    sent: list[bytes] = []
    event_buffer = EventBuffer({})
    flusher = Flusher(event_buffer, BatchMaker(lambda: 0, lambda calls, title: ""), sent.append, lambda: False)
    with closing(flusher):
        event_buffer.is_filled = True  # and the event was not set
        flusher.start()
        event_buffer.put(LoggedValue("loss", 0.5, None, 0, False, 1, event_buffer.moment))
        wait_until(lambda: len(event_buffer) == 0, 10)
    assert sent


def passing_on() -> tuple[EventBuffer, Flusher, list[float]]:
    """Return an event buffer, the flusher that empties it, and the metrics that were passed on."""
    told: list[float] = []
    event_buffer = EventBuffer({})

    def send(data: bytes) -> None:
        if (metrics := decode(data).tables.get("metric")) is not None:
            told.extend(metrics["value"])

    return (
        event_buffer,
        Flusher(event_buffer, BatchMaker(lambda: 0, lambda calls, title: ""), send, lambda: False),
        told,
    )


def test_what_comes_late_from_a_gpu_is_told_at_the_end():
    """A script may end before its GPU has finished the last work."""

    class Event:
        looks = 0

        def query(self) -> bool:
            self.looks += 1
            return self.looks > 2

    event_buffer, flusher, told = passing_on()
    event_buffer.put(LoggedValue("loss", torch.tensor(0.5), Event(), 0, False, 1, event_buffer.moment))
    flusher.close()
    assert told == [0.5]


def test_a_gpu_that_does_not_come_on_holds_up_one_question_only():
    """The notebook waits once for the last issued operation, and not in each request during a hang."""

    class Event:
        has_happened = False

        def query(self) -> bool:
            return self.has_happened

    event_buffer, flusher, told = passing_on()
    events = Event(), Event()
    event_buffer.put(LoggedValue("loss", torch.tensor(0.5), events[0], 0, False, 1, event_buffer.moment))
    began = time.monotonic()
    flusher.flush(0.2)
    in_vain = time.monotonic()
    assert in_vain - began >= 0.2
    for _ in range(100):
        flusher.flush(10.0)
    assert time.monotonic() - in_vain < 5
    event_buffer.put(LoggedValue("loss", torch.tensor(0.25), events[1], 0, False, 1, event_buffer.moment))
    events[0].has_happened = True
    threading.Timer(0.05, setattr, (events[1], "has_happened", True)).start()
    flusher.flush(10.0)
    assert told == [0.5, 0.25]


def test_memory_that_cannot_be_read_costs_no_record(monkeypatch):
    """An example is a failed GPU: the last records before the failure are the most important."""

    def fails(*_: object) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(Resources, "row", fails)
    sent: list[bytes] = []
    event_buffer = EventBuffer({})
    flusher = Flusher(event_buffer, BatchMaker(lambda: 0, lambda calls, title: ""), sent.append, lambda: False)
    event_buffer.put(LoggedValue("loss", 0.5, None, 0, False, 1, event_buffer.moment))
    flusher.flush()
    assert [decode(data).tables["metric"]["value"].tolist() for data in sent] == [[0.5]]


def test_a_remote_call_that_makes_no_row_costs_no_other_its():
    """Rows of remote calls are created in bulk."""
    moment = Moment(1, 1, 0, 0)
    # not an unsigned number
    calls = [Ran("f", 1, number, 0, 7, 10, moment=moment, ended_ns=20) for number in (1, -1, 3)]
    batch = BatchMaker(lambda: 0, lambda calls, title: "").batch(calls)
    assert batch.dropped == 1
    assert batch.tables["rpc"]["number"].tolist() == [1, 3]


def test_a_recording_in_a_variable_includes_later_cells(ranks):
    recording = ranks.recording
    for count in range(1, 6):
        ranks.run(f"for _ in range({count}): dist.all_reduce(torch.ones({count}))", quiet=True)
        newest = recording.collectives("all_reduce", rank=1)[-count:]
        assert [one.shapes for one in newest] == [((count,),)] * count


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "complex64"])
def test_what_was_sent_can_be_resized_afterwards(ranks, dtype):
    """FSDP1 frees gathered parameters in this way."""
    ranks.run(
        f"x = torch.ones(4, dtype=torch.{dtype}); dist.broadcast(x, 0)\nx.resize_(100)\n"
        f"y = torch.ones(9000, dtype=torch.{dtype}); dist.broadcast(y, 0)\ny.untyped_storage().resize_(0)",
        quiet=True,
    )


def test_a_default_device_leaves_tensors_their_own_operators(ranks):
    """It is a function mode that stays active."""
    ranks.run(
        "from torch.distributed.tensor import DeviceMesh, Replicate, distribute_tensor\n"
        "torch.set_default_device('cpu')\n"
        "mesh = DeviceMesh('cpu', [0, 1])\n"
        "log(of_dtensor=distribute_tensor(torch.ones(()), mesh, [Replicate()]))\n"
        "torch.set_default_device(None)",
        quiet=True,
    )
    assert ranks.recording.metrics["of_dtensor"].of_rank(1)[1].tolist() == [1.0]


@pytest.mark.long
def test_torch_compiles_a_model_in_ddp_as_a_whole_where_it_can(ranks):
    ranks.run(
        """
from torch._dynamo import compiled_autograd
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
whole = dict(fullgraph=True, backend="eager")  # which raises at a graph break
python_reducer = torch._dynamo.config.patch(optimize_ddp="python_reducer")
with python_reducer: model = torch.nn.parallel.DistributedDataParallel(net)
torch.manual_seed(rank); x = torch.randn(3, 4)
""",
        quiet=True,
    )
    rows = new_calls(
        ranks,
        """
with python_reducer:
    loss = torch.compile(model, **whole)(x).sum()
    with compiled_autograd._enable(torch.compile(**whole)):
        loss.backward()
""",
    )
    assert np.count_nonzero(rows["rank"] == 0) == 4  # a sum for each parameter
    ranks.run(
        """
own = torch.autograd.grad(net(x).sum(), list(net.parameters()))
for gradient in own: dist.all_reduce(gradient)
right = all(torch.allclose(p.grad, one / world_size, atol=1e-6) for p, one in zip(net.parameters(), own))
""",
        quiet=True,
    )
    assert set(ranks["right"].values()) == {True}


@pytest.mark.long
def test_torch_compiles_a_model_in_tensor_parallel_as_a_whole(ranks):
    ranks.run(
        """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
torch.manual_seed(0)
whole = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
x = torch.randn(3, 4)
wanted = whole(x)
mesh = init_device_mesh("cpu", (2,))
parallel = parallelize_module(whole, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
right = torch.allclose(torch.compile(parallel, fullgraph=True, backend="aot_eager")(x), wanted, atol=1e-6)
""",
        quiet=True,
    )
    assert set(ranks["right"].values()) == {True}


def test_a_forward_of_the_users_own_class_of_ddp_is_kept(ranks):
    ranks.run(
        """
class More(torch.nn.parallel.DistributedDataParallel):
    def forward(self, x): return super().forward(x) + 100
net, x = torch.nn.Linear(4, 2), torch.ones(3, 4)
with torch._dynamo.config.patch(optimize_ddp="python_reducer"): more = More(net)
right = bool(torch.equal(more(x), net(x) + 100))
""",
        quiet=True,
    )
    assert set(ranks["right"].values()) == {True}


def test_a_process_id_that_comes_again_is_another_process():
    """Linux reuses process ids, early in a container: a replaced rank must not continue the rows of the dead rank.
    (Two makers in one process have one id.)"""
    first, second = (BatchMaker(lambda: 0, lambda calls, title: "").batch([]) for _ in range(2))
    assert first.stream != second.stream
    assert decode(encode(first)).stream == first.stream


def test_functions_that_save_can_be_sent_to_another_process(ranks):
    ranks.run(
        "import pickle, torch.distributed.checkpoint as dcp\n"
        "for function in (torch.save, torch.serialization.save, dcp.save, dcp.async_save):\n"
        "    assert pickle.loads(pickle.dumps(function)) is function",
        quiet=True,
    )


@pytest.mark.long
def test_cpu_time_of_ended_child_processes_counts_for_the_rank():
    if not Path("/proc/self/schedstat").exists():
        pytest.skip("this system counts nothing")
    looks = Resources()
    before_ns = looks.row(0)["ran_ns"] - time.process_time_ns()
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.4: pass"], check=True)
    of_children_ns = looks.row(0)["ran_ns"] - time.process_time_ns() - before_ns
    assert 0.38e9 < of_children_ns < 0.8e9
