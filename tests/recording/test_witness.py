"""One run as recorded by this package, by torch's profiler and by DDP's timers in C++."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ddp_notebook import api
from ddp_notebook.errors import RankError
from ddp_notebook.observe.recording import Recording
from tests.recording.witness import cell_of_last, expect_agreement, operations, operations_off, spans, spans_off

KEPT, STEPS = 3, 12
SET_UP = """
import torch, torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from ddp_notebook.rank.record.value_sampling import ValueSampling
from tests.recording.on_rank import Notes, Witness, make, train
def halve(state, bucket):
    averaged = bucket.buffer().div_(world_size)
    return dist.all_reduce(averaged, async_op=True).get_future().then(lambda done: done.value()[0])
def again(state, bucket):
    return halve(state, bucket)
"""


@pytest.fixture(scope="module")
def session(waiting_host_server) -> Iterator[Any]:
    """Start two ranks without the guard, whose comparisons the profiler would record too.

    Values are off, because the ranges of the profiler would end only after the values were inspected.
    """
    waiting_host_server()
    with api.start(2, guard=False) as running:
        running.record("meta")
        running.run(SET_UP, quiet=True)
        yield running


def witnessed(session: Any, work: str, set_up: str = "") -> int:
    """Run code on all ranks under the profiler. Return the number of its cell."""
    session.run(f"{set_up}\nwitness = Witness()", quiet=True)
    code = f"with witness.watching():\n{textwrap.indent(textwrap.dedent(work), '    ')}\nranges = witness.ranges"
    session.run(code, quiet=True)
    return cell_of_last(session)


# ---- models in DDP

# Code that creates the models, how they are trained, and the number of buckets per step after the rebuild.
CASES = {
    "one bucket": ("models = [make('Small', bucket_cap_mb=25)]", "", 1),
    "many buckets": ("models = [make('Deep')]", "", 4),
    "a parameter that is used twice": ("models = [make('Tied', bucket_cap_mb=0.2)]", "", 2),
    "one bucket, no_sync": ("models = [make('Small', bucket_cap_mb=25)]", "accumulate=3", 1),
    "many buckets, no_sync": ("models = [make('Deep')]", "accumulate=3", 4),
    "a parameter that is used twice, no_sync": ("models = [make('Tied', bucket_cap_mb=0.2)]", "accumulate=3", 2),
    "find_unused_parameters": ("models = [make('Branching', find_unused_parameters=True)]", "", 4),
    "static_graph": ("models = [make('Deep', static_graph=True)]", "", 4),
    "two models": ("models = [make('Deep'), make('Small')]", "", 6),
    "two backwards": ("models = [make('Deep')]", "backwards=2", 8),
    "a user's hook": ("models = [make('Deep')]; models[0].register_comm_hook(None, halve)", "", 4),
    "fp16_compress": (
        "models = [make('Deep')]; models[0].register_comm_hook(None, default_hooks.fp16_compress_hook)",
        "",
        4,
    ),
}


@pytest.fixture(params=[pytest.param("meta", marks=pytest.mark.long), "values"])
def level(request, session) -> Iterator[str]:
    """With values of the first steps only: buckets of other steps use a fast path through the kernel."""
    if request.param == "values":
        session.run(f"ValueSampling.keeps, keeps = lambda self, step: step < {KEPT}, ValueSampling.keeps", quiet=True)
        session.record("values")
    yield request.param
    if request.param == "values":
        session.run("ValueSampling.keeps = keeps", quiet=True)
        session.record("meta")


_QUICK = ("one bucket, no_sync", "many buckets", "find_unused_parameters", "two models", "a user's hook")


@pytest.mark.parametrize("case", [pytest.param(one, marks=() if one in _QUICK else pytest.mark.long) for one in CASES])
def test_ddp_is_recorded_as_torch_sees_it(session, level, case):
    set_up, how, buckets = CASES[case]

    def look() -> list[str]:
        cell = witnessed(session, f"train(models, {STEPS}, witness=witness, {how})", set_up)
        for rank in range(2):
            steps = session.recording.steps(cell=cell, rank=rank)
            assert [step.step for step in steps] == list(range(STEPS))
            assert {len(step.buckets) for step in steps[2:]} == {buckets}
        session.run("timers = witness.timers", quiet=True)
        timers = session.pull("timers")
        off = operations_off(session)
        for rank in range(2) if case != "two models" else ():  # a timer belongs to one of them
            off += timers_off(session.recording, cell, rank, timers[rank])
        return off

    expect_agreement(look)


def timers_off(recording: Recording, cell: int, rank: int, timers: list[dict[str, int]]) -> list[str]:
    """Return differences between the last forward and backward of each step and DDP's timers, without the first
    step."""
    calls = [one for one in operations(recording, cell, rank) if one.api == "backward"]
    calls += [one for one in recording.collectives(cell=cell, rank=rank) if one.bucket is not None]
    forwards, backwards = (spans(recording, cell, rank, kind) for kind in ("forward", "backward"))
    ours: list[tuple[int, ...]] = []
    for step in range(1, STEPS):
        forward, backward = (rows[rows["step"] == step][-1] for rows in (forwards, backwards))
        mine = [one for one in calls if one.step == step and one.issue_ns > forward["end_ns"]]
        start = int(forward["start_ns"])
        first, last = min(one.issue_ns for one in mine), max(one.end_ns or 0 for one in mine)
        ours.append((forward["end_ns"] - start, last - first, first - start, backward["end_ns"] - start))
    theirs = [
        (
            of["forward_compute_time"],
            of["backward_comm_time"],
            of["backward_comm_time_start"] - of["forward_compute_time_start"],
            of["backward_comm_time_end"] - of["forward_compute_time_start"],
        )
        for of in timers[1:]
    ]
    what = ("forwards", "communication", "first buckets", "ends of backward")
    columns = zip(what, np.array(ours, np.float64).T, np.array(theirs, np.float64).T, strict=True)
    # The reducer reads the time after it has waited, when its thread has a core again.
    return [text for name, mine, its in columns for text in spans_off(mine, its, f"{name} of rank {rank}", 0.25)]


def test_power_sgd(session):
    """PowerSGD calls collectives in gloo's threads, which the profiler does not observe.

    There is one bucket, because PowerSGD also waits in these threads, and more buckets hang even without this package.
    """
    session.run(
        f"""
models = [make('Small', bucket_cap_mb=25)]
state = powerSGD_hook.PowerSGDState(dist.group.WORLD, 1, start_powerSGD_iter=4)
models[0].register_comm_hook(state, powerSGD_hook.powerSGD_hook)
train(models, {STEPS})""",
        quiet=True,
    )
    recording, cell = session.recording, cell_of_last(session)
    for rank in range(2):
        of_hook = [one for one in operations(recording, cell, rank) if one.origin == "ddp hook"]
        # Biases and other uncompressed data, then two factors.
        assert [sum(one.step == step for one in of_hook) for step in range(STEPS)] == [1] * 4 + [3] * (STEPS - 4)
        wholes = recording.collectives(op="comm hook powerSGD_hook", cell=cell, rank=rank)
        # Sorted by step: a thread of gloo reports each when it ends, and may get the GIL after the next one.
        assert sorted((one.step, one.bucket, one.module) for one in wholes) == [(n, 0, "Small") for n in range(STEPS)]
        for whole in wholes:
            parts = [one for one in of_hook if one.step == whole.step]
            assert whole.issue_ns <= parts[0].issue_ns and all(one.state == "done" for one in parts)


# ---- buckets

LAYOUTS = {
    "one bucket": "make('Small', bucket_cap_mb=25)",
    "many buckets": "make('Deep')",
    "a parameter that is used twice": "make('Tied', bucket_cap_mb=0.2)",
    "find_unused_parameters": "make('Branching', find_unused_parameters=True)",
    "static_graph": "make('Deep', static_graph=True)",
    "without views": "make('Deep', gradient_as_bucket_view=False)",
}


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_buckets_are_what_a_comm_hook_is_given(session, layout):
    """In another run: a hook sees its buckets by itself. Before they are rebuilt, right after, and from then on."""
    session.run(f"model = {LAYOUTS[layout]}; train([model], 4)", quiet=True)
    cell = cell_of_last(session)
    session.run(
        f"model = {LAYOUTS[layout]}; notes = Notes(model); train([model], 4, on_step=notes.next_step)", quiet=True
    )
    session.run("buckets = notes.buckets[:-1]", quiet=True)
    recording, theirs = session.recording, session.pull("buckets")
    for rank in range(2):
        steps = recording.steps(cell=cell, rank=rank)
        ours = [[(one.nbytes, one.parameters) for one in step.buckets] for step in steps]
        assert ours == theirs[rank]
        assert all(name for step in ours for _, names in step for name in names)
    assert len({len(step) for step in theirs[0]}) == 1 + (
        layout in ("many buckets", "static_graph", "without views", "a parameter that is used twice")
    ), "they were rebuilt"


def test_a_hook_that_returns_no_future_raises_torchs_error(session):
    code = "model = make('Deep'); model.register_comm_hook(None, lambda state, bucket: 1); train([model], 1)"
    with pytest.raises(RankError, match=r"callback must return a torch\.futures\.Future object"):
        session.run(code, quiet=True)


def test_a_hook_gets_sparse_gradients(session):
    session.run(
        "def sums(state, bucket):\n"
        "    fut = dist.all_reduce(bucket.buffer(), async_op=True).get_future()\n"
        "    return fut.then(lambda fut: fut.value()[0])\n"
        "words = torch.nn.parallel.DistributedDataParallel(torch.nn.EmbeddingBag(4, 2, sparse=True))\n"
        "words.register_comm_hook(None, sums)\n"
        "words(torch.tensor([[rank, 3]])).sum().backward(); rows = words.module.weight.grad.to_dense()[:, 0].tolist()",
        quiet=True,
    )
    assert session["rows"][0] == session["rows"][1] == [0.5, 0.5, 0.0, 1.0]
    (bucket,) = [one for one in session.recording.collectives(rank=0) if one.op == "comm hook sums"]
    assert bucket.nbytes == 2 * 8 + 2 * 2 * 4  # numbers of two rows, and two rows


def test_a_hook_keeps_its_slot_and_can_be_registered_again(session):
    """In a later cell. torch itself would reject this."""
    session.run("model = make('Deep'); model.register_comm_hook(None, halve); train([model], 3)", quiet=True)
    first = cell_of_last(session)
    session.run("model.register_comm_hook(None, again); train([model], 3)", quiet=True)
    second, recording = cell_of_last(session), session.recording
    for cell, hook, counts in ((first, "halve", [1, 4, 4]), (second, "again", [4, 4, 4])):
        for rank in range(2):
            calls = recording.collectives(cell=cell, rank=rank)
            wholes = [one for one in calls if one.op.startswith("comm hook")]
            assert {one.op for one in wholes} == {f"comm hook {hook}"} and {one.api for one in wholes} == {hook}
            assert [sum(one.step == step for one in wholes) for step in range(3)] == counts
            inside = [one for one in calls if one.op == "all_reduce"]
            assert len(inside) == len(wholes) and {one.api for one in inside} == {"all_reduce"}
            assert {one.site.rpartition(" in ")[2] for one in inside} == {"halve"}
    session.run("same = [p.grad.sum().item() for p in model.parameters()]", quiet=True)
    assert session.pull("same")[0] == session.pull("same")[1], "gradients are averaged"


# ---- other ways to train in parallel

FSDP = """
from torch.distributed.fsdp import fully_shard
from tests.recording.on_rank import Deep
torch.manual_seed(0)
model = Deep()
for layer in model: fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
"""
STEP = """
for _ in range(8):
    optimizer.zero_grad(); model(torch.randn(8, 512)).sum().backward(); optimizer.step()
"""


def test_fsdp_by_module(session):
    """The profiler has separate ranges of FSDP, with the names of the modules."""

    def look() -> list[str]:
        cell = witnessed(session, STEP, FSDP)
        recording, seen = session.recording, session.pull("ranges")
        for rank in range(2):
            names = Counter(name for name, _, _ in seen[rank])
            found = operations(recording, cell, rank)
            assert {one.origin for one in found} == {"fsdp"} and {one.site for one in found} == {"cell line 4"}
            for op, its_range in (
                ("all_gather_single", "all_gather"),
                ("reduce_scatter_single", "post_backward_reduce"),
            ):
                mine = Counter(one.module for one in found if one.op == op)
                assert set(mine) == {"0", "1", "2", "3"}
                assert {f"FSDP::{its_range} ({name})": count for name, count in mine.items()} == {
                    name: count for name, count in names.items() if name.startswith(f"FSDP::{its_range} (")
                }
            of_layer = 4 * (512 * 512 + 512)
            gathered = {(one.nbytes_in, one.nbytes_out) for one in found if one.op == "all_gather_single"}
            scattered = {(one.nbytes_in, one.nbytes_out) for one in found if one.op == "reduce_scatter_single"}
            assert gathered == {(of_layer // 2, of_layer)} and scattered == {(of_layer, of_layer // 2)}
            assert len(recording.steps(cell=cell, rank=rank)) == 8 and len(spans(recording, cell, rank, "forward")) == 8
        return operations_off(session)

    expect_agreement(look)


TENSOR_PARALLEL = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 512))
model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
"""


def test_tensor_parallel(session):
    """DTensor: one all_reduce of the output of the last layer in a forward, for which the rank waits."""

    def look() -> list[str]:
        cell = witnessed(session, STEP, TENSOR_PARALLEL)
        blocked: list[int] = []
        for rank in range(2):
            found = operations(session.recording, cell, rank)
            assert [(one.op, one.origin, one.reduce_op) for one in found] == [("all_reduce", "dtensor", "SUM")] * 8
            assert {(one.shapes, one.nbytes_in, one.site) for one in found} == {
                (((8, 512),), 8 * 512 * 4, "cell line 4")
            }
            blocked += [one.blocked_ns for one in found]
        assert any(ns > 0 for ns in blocked), "not every one: it may be over when its output is used, by who comes last"
        return operations_off(session)

    expect_agreement(look)


PIPELINE = """
from torch.distributed.pipelining import PipelineStage, {schedule}
torch.manual_seed(0)
stage = PipelineStage(torch.nn.Linear(64, 64), rank, world_size, torch.device("cpu"))
schedule = {schedule}(stage, n_microbatches=4, loss_fn=lambda out, target: (out - target).square().mean())
x, target = torch.randn(16, 64), torch.randn(16, 64)
schedule.step(x) if rank == 0 else schedule.step(target=target)
"""


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B"])
def test_pipeline(session, schedule):
    """A micro-batch is sent to the next stage, and its gradient is sent back."""

    def look() -> list[str]:
        work = "for _ in range(4):\n    schedule.step(x) if rank == 0 else schedule.step(target=target)"
        cell = witnessed(session, work, PIPELINE.format(schedule=schedule))
        for rank, (forward, backward) in enumerate((("send", "recv"), ("recv", "send"))):
            found = operations(session.recording, cell, rank)
            assert Counter((one.op, one.peer) for one in found) == {(forward, 1 - rank): 16, (backward, 1 - rank): 16}
            assert {(one.shapes, one.origin, one.api) for one in found} == {(((4, 64),), "pipeline", "step")}
            assert {one.site for one in found} == {"cell line 3"}
        return operations_off(session)

    expect_agreement(look)
