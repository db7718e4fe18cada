"""Operations of this process as the recorder sees them, in a group of one rank with the real kernels of torch."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.two_tensor import TwoTensor

from ddp_notebook.rank.group.operators import SPECS
from ddp_notebook.rank.group.recorder import Recorder
from ddp_notebook.records.operation import OPERATIONS
from tests.conftest import wait_until


@pytest.fixture(scope="module")
def group():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


@pytest.fixture
def recorder(group):
    made = Recorder()
    made.install()
    yield made
    made.remove()


def test_every_collective_is_counted_and_none_is_left(recorder):
    x = torch.ones(4)
    calls = [
        lambda: dist.all_reduce(x),
        lambda: dist.broadcast(x, 0),
        lambda: dist.reduce(x, 0),
        lambda: dist.all_gather([torch.empty(4)], x),
        lambda: dist.gather(x, [torch.empty(4)]),
        lambda: dist.scatter(x, [torch.ones(4)]),
        lambda: dist.reduce_scatter(x, [torch.ones(4)]),
        lambda: dist.all_to_all_single(torch.empty(4), x),
        lambda: dist.barrier(),
        lambda: dist.all_gather_object([None], "object"),  # two operations: the sizes, then the pickled objects
    ]
    for call in calls:
        call()
    assert recorder.counts == {"0": {"collective": len(calls) + 1, "send": 0, "recv": 0, "sent": {}}}
    assert recorder.live == {} and recorder.by_work == {} and recorder.waiting == {}


@pytest.mark.parametrize("is_async", [False, True])
def test_nothing_is_left_of_an_operation_on_a_tensor_made_of_two(recorder, is_async):
    """torch calls the operator for each inner tensor, and the caller waits for one `Work`."""

    def two(value):
        return TwoTensor(torch.full((4,), value), torch.full((4,), value))

    tensor = two(0.0)
    for call in (
        lambda: dist.scatter(tensor, [two(1.0)], async_op=is_async),
        lambda: dist.all_reduce(tensor, async_op=is_async),
    ):
        work = call()
        if work is not None:
            work.wait()
        assert recorder.counts["0"]["collective"] % 2 == 0 and recorder.unwaited == {}
        wait_until(lambda: recorder.operations() == [])  # the `Work` is one of two that run at the same time
    assert tensor.b.tolist() == [1.0] * 4


def test_an_operation_is_described_when_somebody_asks(recorder):
    seen = []
    recorder.guard = lambda call: seen.append(call.describe())
    dist.all_reduce(torch.ones(3, 2, dtype=torch.float16), op=dist.ReduceOp.MAX)
    dist.broadcast(torch.ones(5), src=0)
    first, second = seen
    assert str(first) == "all_reduce #1 of group default" and first.what == "float16[3,2]"
    assert (first.nbytes, first.reduce_op, first.ranks, first.root) == (12, "MAX", (0,), None)
    assert str(second) == "broadcast #2 of group default" and second.root == 0
    assert type(first).from_json(first.to_json()) == first


def test_what_nobody_waits_for_is_forgotten_when_it_is_over(recorder):
    for _ in range(200):
        dist.all_reduce(torch.ones(4), async_op=True)
    recorder.prune()
    assert len(recorder.live) < 200
    dist.barrier()
    recorder.prune()
    assert recorder.live == {} == recorder.by_work


def test_the_names_of_operations_are_known_on_both_sides():
    assert {spec.name for spec in SPECS.values()} == set(OPERATIONS)


def test_an_operation_can_be_refused(recorder):
    recorder.refusal = lambda group: KeyboardInterrupt(f"not now, {group.title}")
    with pytest.raises(KeyboardInterrupt, match="not now, default"):
        dist.all_reduce(torch.ones(1))
    recorder.refusal = None
    dist.all_reduce(torch.ones(1))
    assert recorder.counts["0"]["collective"] == 1, "what was refused is not counted"


def test_of_every_thread(recorder):
    def work() -> None:
        dist.all_reduce(torch.ones(1))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert recorder.counts["0"]["collective"] == 4 and recorder.waiting == {}


def test_after_it_is_removed_nothing_is_seen(group):
    made = Recorder()
    made.install()
    made.remove()
    dist.all_reduce(torch.ones(1))
    assert made.begun == 0


def test_gloo_is_kept_from_what_would_end_the_process(group):
    """Tensors that claim to be on a GPU would end the process on a machine without a GPU."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from ddp_notebook.rank.group.kernels import kernel

    world = dist.distributed_c10d._get_default_group()
    kernel.refuse_on_gpu("send", world, [torch.ones(2)])
    with FakeTensorMode():
        x = torch.empty(2, device="cuda")
    with pytest.raises(RuntimeError, match=r"gloo cannot send GPU tensors.*x\.cpu\(\).*--backend nccl"):
        kernel.refuse_on_gpu("send", world, [x])
