"""Ranks with NCCL: collectives with their values and times, wrong programs that stop, dead ranks.

On a single GPU two ranks share it. NCCL accepts this if it considers the ranks to be on different hosts.
"""

from __future__ import annotations

import re
import threading
import time
from typing import Any

import numpy as np
import pytest

import ddp_notebook
from ddp_notebook.errors import CellTimeoutError, RankDiedError, RankError
from ddp_notebook.messages.record_options import RecordOptions
from tests.conftest import wait_until

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

SUM = "x = torch.ones(1, device=device); dist.all_reduce(x); int(x)"
HANG = "if rank == 0:\n    y = torch.ones(4, device=device); dist.all_reduce(y); y.sum().item()"
MODEL = """
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8)).to(device)
"""
DDP_LOOP = (
    MODEL
    + """
model = DDP(net, device_ids=[device.index], bucket_cap_mb=0.1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
_ = torch.manual_seed(rank)
x = torch.randn(32, 64, device=device)
def step():
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss
"""
)


def start(gpus, **options):
    """Start two ranks with NCCL, on two GPUs or on one."""
    if len(gpus) > 1:
        return ddp_notebook.start(2, backend="nccl", **options)
    return ddp_notebook.start(2, gpus=("0",), backend="nccl", share_gpus=True, **options)


@pytest.fixture(scope="module")
def ranks(gpus, waiting_host_server):
    waiting_host_server()
    with start(gpus, hang_after_s=1.0) as session:
        assert session.backend == "nccl"
        yield session


@pytest.fixture
def own_ranks(gpus, waiting_host_server):
    """Start ranks for tests that change the session."""
    if (running := ddp_notebook.current()) is not None:
        running.stop()
    waiting_host_server()
    with start(gpus, hang_after_s=1.0) as session:
        yield session


def of_last_cell(session, **which):
    calls = session.recording.collectives(**which)
    cell = max(call.cell for call in calls)
    return [call for call in calls if call.cell == cell]


# ---- what is recorded


def test_every_collective_computes_what_it_should(ranks):
    ranks.run("""
full = lambda n, v: torch.full((n,), float(v), device=device)
def check(found, wanted): assert torch.equal(found, wanted), (found, wanted)
x = full(4, rank + 1); dist.all_reduce(x); check(x, full(4, 3))
x = full(4, rank + 1); dist.broadcast(x, 1); check(x, full(4, 2))
x = full(4, rank + 1); dist.reduce(x, 1, op=dist.ReduceOp.MAX)
if rank == 1: check(x, full(4, 2))
parts = [torch.empty(4, device=device) for _ in range(2)]
dist.all_gather(parts, full(4, rank)); check(torch.cat(parts), torch.cat([full(4, 0), full(4, 1)]))
out = torch.empty(8, device=device)
dist.all_gather_into_tensor(out, full(4, rank)); check(out, torch.cat([full(4, 0), full(4, 1)]))
out = torch.empty(4, device=device)
dist.reduce_scatter_tensor(out, torch.arange(8., device=device))
check(out, torch.arange(4., device=device) * 2 + 8 * rank)
out = torch.empty(4, device=device)
dist.all_to_all_single(out, torch.arange(4., device=device) + 10 * rank)
check(out, torch.tensor([0., 1, 10, 11], device=device) + 2 * rank)
got = torch.empty(2, device=device)
ops = [dist.P2POp(dist.isend, full(2, rank), 1 - rank), dist.P2POp(dist.irecv, got, 1 - rank)]
for work in dist.batch_isend_irecv(ops): work.wait()
check(got, full(2, 1 - rank))
dist.send(full(3, 7), 1) if rank == 0 else dist.recv(got := torch.empty(3, device=device), 0)
objects = [None, None]; dist.all_gather_object(objects, {"rank": rank}); assert objects == [{"rank": 0}, {"rank": 1}]
dist.barrier()
work = dist.all_reduce(x := full(4, rank + 1), async_op=True); work.wait(); check(x, full(4, 3))
torch.cuda.synchronize()
""")
    calls = of_last_cell(ranks, rank=0)
    assert {call.op for call in calls} >= {"all_reduce", "broadcast", "reduce", "barrier", "send"}, {
        c.op for c in calls
    }
    for call in calls:
        assert call.end_ns is not None and call.start_ns <= call.end_ns, call


@pytest.mark.parametrize("is_async", [False, True])
def test_values_before_and_after(ranks, is_async):
    """The values are correct even if the output is overwritten at once."""
    ranks.run(
        "a = torch.randn(2048, 2048, device=device)\nfor _ in range(20): a = a @ a / 64\n"
        f"x = torch.arange(6., device=device) + rank\nwork = dist.all_reduce(x, async_op={is_async})\n"
        "work is None or work.wait()\nx.fill_(-1)\ntorch.cuda.synchronize()"
    )
    for rank in (0, 1):
        (call,) = of_last_cell(ranks, rank=rank)
        np.testing.assert_array_equal(call.input.first, np.arange(6) + rank)
        np.testing.assert_array_equal(call.output.first, np.arange(6) * 2 + 1)
        assert call.issue_ns < call.start_ns < call.end_ns
        assert call.start_ns - call.issue_ns > 1e6, "queued behind the products"


def test_buckets_of_ddp_have_values_times_and_waits(ranks, record_property):
    ranks.run(DDP_LOOP, quiet=True)
    ranks.run("for _ in range(5): step()\ntorch.cuda.synchronize()")
    calls = [call for call in of_last_cell(ranks) if call.op == "all_reduce"]
    steps = {(call.rank, call.step) for call in calls}
    assert len(steps) == 10, steps
    assert max(call.bucket for call in calls) > 0, "several buckets in each"
    by_number: dict[int, dict[int, Any]] = {}
    for call in calls:
        assert call.issue_ns <= call.start_ns < call.end_ns
        by_number.setdefault(call.number, {})[call.rank] = call
    for both in by_number.values():
        assert len(both) == 2
        a, b = both[0], both[1]
        if a.input is not None and a.output is not None:
            np.testing.assert_allclose(a.output.first, b.output.first)
            np.testing.assert_allclose(a.output.first, a.input.first + b.input.first, rtol=1e-4, atol=1e-6)
    last = max(call.step for call in calls)
    took = [(call.end_ns - call.start_ns) / 1e6 for call in calls if call.step == last and call.rank == 0]
    record_property("ms of the last step's buckets", ", ".join(f"{ms:.2f}" for ms in took))
    report = str(ranks.recording.steps())
    assert report


def test_a_straggler_is_named(ranks):
    ranks.run(DDP_LOOP, quiet=True)
    ranks.run(
        "import time\nfor n in range(12):\n    if rank == 1: time.sleep(0.03)\n    step().item()",
        quiet=True,
    )
    assert ranks.recording.straggler().rank == 1


def test_collectives_of_fsdp2_are_named_and_train(ranks):
    ranks.run(
        MODEL + "from torch.distributed.fsdp import fully_shard\n"
        "for layer in net:\n    if isinstance(layer, nn.Linear): fully_shard(layer)\n"
        "fully_shard(net)\nadam = torch.optim.Adam(net.parameters())\nx = torch.randn(16, 64, device=device)",
        quiet=True,
    )
    ranks.run(
        "for _ in range(2):\n    net(x).square().mean().backward(); adam.step(); adam.zero_grad()\n"
        "torch.cuda.synchronize()"
    )
    calls = of_last_cell(ranks, rank=0)
    named = {(call.module, call.meaning) for call in calls}
    for module in ("0", "2", "4"):
        assert (module, "all-gather of parameters") in named and (module, "reduce-scatter of gradients") in named, named


def test_memory_of_the_gpu_is_split(ranks):
    ranks.run(
        "adam = None" + MODEL + "model = DDP(net, device_ids=[device.index], gradient_as_bucket_view=True)\n"
        "optimizer = torch.optim.Adam(model.parameters())\n"
        "x = torch.randn(8, 64, device=device)\n"
        "def step():\n    optimizer.zero_grad(); model(x).sum().backward(); optimizer.step()",
        quiet=True,
    )
    memory = ranks.memory("step()")
    (numel,) = set(ranks.run("sum(p.numel() for p in net.parameters())")[rank].result for rank in (0, 1))
    for rank in (0, 1):
        of = memory[rank]
        wanted = [each * int(numel) for each in (4, 4, 8)]
        assert [of.parameters, of.gradients, of.optimizer_state] == pytest.approx(wanted, rel=0.03)


def test_a_graph_is_captured_while_all_is_recorded(ranks):
    ranks.run("""
x = torch.ones(4, device=device)
dist.all_reduce(x)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    dist.all_reduce(x)
x.fill_(1)
for _ in range(3): graph.replay()
torch.cuda.synchronize()
found = x.tolist()
del graph
""")
    assert ranks.pull("found") == {0: [8.0] * 4, 1: [8.0] * 4}


def test_a_profile_has_the_gpus_kernels(ranks, tmp_path):
    ranks.run(DDP_LOOP, quiet=True)
    code = "for _ in range(3): step()\ntorch.cuda.synchronize()"
    ranks.run(code, quiet=True, record=RecordOptions(profile=True))
    profiles, lost = ranks._write_trace(tmp_path / "trace.json")
    assert not lost and len(profiles) == 2
    text = (tmp_path / "trace.json").read_text()
    assert "ncclDevKernel_AllReduce" in text, re.findall(r"nccl\w+", text)[:9]


def test_tensors_go_to_the_notebook_and_back(ranks):
    ranks.run("x = torch.arange(4., device=device) + rank")
    pulled = ranks.pull("x")
    assert [x.tolist() for x in pulled.values()] == [[0, 1, 2, 3], [1, 2, 3, 4]]
    ranks.push(x=pulled[1].to("cpu"))
    ranks.run("x = x.to(device)")
    assert ranks.run("x.tolist()")[0].result == "[1.0, 2.0, 3.0, 4.0]"


# ---- wrong programs


def test_a_rank_that_waits_in_vain_is_named_and_stopped(ranks, record_property, capsys):
    ranks.run("kept = rank")
    began_s = time.monotonic()
    with pytest.raises(CellTimeoutError) as caught:
        ranks.run(HANG, timeout_s=4)
    record_property("stopped after", f"{time.monotonic() - began_s - 4:.2f} s")
    record_property("said", " / ".join(str(caught.value).splitlines()))
    assert re.search(
        r"rank 0: waiting in all_reduce #\d+ of group default \(float32\[4\], 16 B, cell line 2(, in item)?\)",
        str(caught.value),
    )
    result = ranks.run(f"{SUM}\nkept, int(x)", timeout_s=60)
    assert [result[rank].result for rank in (0, 1)] == ["(0, 2)", "(1, 2)"]


def test_the_card_says_who_waits_for_whom(ranks):
    seen = []

    def look():
        wait_until(lambda: "all_reduce" in str(ranks.status()), 20, "the status tells")
        seen.append(str(ranks.status()))

    thread = threading.Thread(target=look)
    thread.start()
    with pytest.raises(CellTimeoutError):
        ranks.run(HANG, timeout_s=4)
    thread.join()
    assert seen and "all_reduce" in seen[0]
    assert ranks.run(SUM, timeout_s=60)[1].result == "2"


def test_mismatched_collectives_are_stopped_repeatedly(ranks, record_property):
    took = []
    for _ in range(3):
        began_s = time.monotonic()
        with pytest.raises(CellTimeoutError):
            ranks.run(
                "for _ in range(3 - rank):\n    z = torch.ones(1 << 20, device=device); dist.all_reduce(z)\n"
                "torch.cuda.synchronize()",
                timeout_s=2,
            )
        took.append(time.monotonic() - began_s - 2)
        assert ranks.run(SUM, timeout_s=60)[0].result == "2"
    record_property("stopped after", ", ".join(f"{s:.2f}" for s in took) + " s")


def test_other_groups_and_models_work_after_a_stop(ranks):
    ranks.run("pair = dist.new_group([0, 1])\ny = torch.ones(1, device=device); dist.all_reduce(y, group=pair)")
    ranks.run(DDP_LOOP, quiet=True)
    ranks.run("step(); torch.cuda.synchronize()", quiet=True)
    with pytest.raises(CellTimeoutError):
        ranks.run("if rank == 0: step().item()\nelse: import time; time.sleep(60)", timeout_s=3)
    ranks.run("for _ in range(3): step()\ntorch.cuda.synchronize()", timeout_s=60, quiet=True)
    same = ranks.run(
        "y = torch.ones(1, device=device); dist.all_reduce(y, group=pair)\n"
        "int(y), [float(p.sum()) for p in net.parameters()]",
        timeout_s=60,
    )
    assert same[0].result == same[1].result and same[0].result.startswith("(2,")


def test_an_error_on_one_rank_ends_the_cell_of_the_other(ranks, record_property):
    began_s = time.monotonic()
    with pytest.raises(RankError, match=r"ValueError: no \(rank 1\)"):
        ranks.run(
            "if rank: raise ValueError('no')\ny = torch.ones(4, device=device); dist.all_reduce(y); y.sum().item()",
            timeout_s=60,
        )
    record_property("ended after", f"{time.monotonic() - began_s:.2f} s")
    assert ranks.run(SUM, timeout_s=60)[0].result == "2"


def test_out_of_memory_leaves_the_rank_and_its_variables(ranks):
    ranks.run("kept = torch.full((4,), 7., device=device)")
    with pytest.raises(RankError, match="OutOfMemoryError"):
        ranks.run("big = [torch.empty(1 << 36, dtype=torch.uint8, device=device) for _ in range(4)]", timeout_s=60)
    ranks.run(
        "dist.all_reduce(kept)\nfound = kept.tolist(), torch.cuda.memory_allocated(device) < 1 << 34", timeout_s=60
    )
    assert ranks.pull("found") == {0: ([14.0] * 4, True), 1: ([14.0] * 4, True)}


# ---- ranks that die or come


def test_a_rank_that_dies_in_a_collective_is_replaced(own_ranks, record_property):
    own_ranks.run(DDP_LOOP, quiet=True)
    own_ranks.run("for _ in range(2): step()\ntorch.cuda.synchronize()\nkept = rank", quiet=True)
    began_s = time.monotonic()
    with pytest.raises(RankDiedError, match=r"exited with status 3 \(rank 1\)"):
        own_ranks.run(
            "import os\nif rank == 1: os._exit(3)\n" + HANG,
            timeout_s=60,
        )
    record_property("ended after", f"{time.monotonic() - began_s:.2f} s")
    began_s = time.monotonic()
    own_ranks.ranks.heal()
    record_property("healed after", f"{time.monotonic() - began_s:.2f} s")
    assert own_ranks.run(SUM, timeout_s=60)[1].result == "2"
    assert own_ranks.run("kept", ranks=0)[0].result == "0"


def test_training_survives_a_death(own_ranks, tmp_path):
    own_ranks.run(DDP_LOOP + "import ddp_notebook, os, pathlib, signal\nlosses = []", quiet=True)
    flag = str(tmp_path / "died")
    own_ranks.run(
        f"""
for s in ddp_notebook.survive(model, optimizer, losses, steps=12):
    with s:
        if rank == 1 and int(s) == 6 and not os.path.exists({flag!r}):
            pathlib.Path({flag!r}).touch(); os.kill(os.getpid(), signal.SIGKILL)
        losses.append(step().item())
""",
        timeout_s=120,
        quiet=True,
    )
    result = own_ranks.run("len(losses), [float(p.double().sum()).hex() for p in net.parameters()]", timeout_s=60)
    assert result[0].result == result[1].result and result[0].result.startswith("(12,")


def test_more_ranks_and_fewer(own_ranks):
    own_ranks.run("kept = torch.ones(3, device=device) * 5")
    own_ranks.ranks.resize(1)
    assert own_ranks.run(SUM, timeout_s=60)[0].result == "1"
    own_ranks.ranks.resize(2)
    result = own_ranks.run(SUM, timeout_s=60)
    assert [result[rank].result for rank in (0, 1)] == ["2", "2"]
    assert own_ranks.run("kept.tolist()", ranks=0)[0].result == "[5.0, 5.0, 5.0]"


def test_variables_of_the_gpu_are_copied_to_a_new_rank(own_ranks):
    own_ranks.run("kept = torch.arange(3., device=device) + rank")
    with pytest.raises(RankDiedError):
        own_ranks.run("import os\nif rank == 1: os._exit(3)\nimport time; time.sleep(5)", timeout_s=60)
    own_ranks.ranks.heal(from_rank=0)
    result = own_ranks.run("str(kept.device), kept.tolist()", timeout_s=60)
    place = "cuda:1" if "cuda:1" in str(own_ranks.status()) else "cuda:0"
    assert result[1].result == f"('{place}', [0.0, 1.0, 2.0])"


def test_remote_calls_with_tensors_of_the_gpu(own_ranks):
    own_ranks.run(
        """
from torch.distributed import rpc
def double(t): return t * 2
options = rpc.TensorPipeRpcBackendOptions()
options.set_device_map(f"worker{1 - rank}", {device: torch.device("cuda", (1 - rank) % torch.cuda.device_count())})
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
found = rpc.rpc_sync(f"worker{1 - rank}", double, args=(torch.ones(3, device=device) * (rank + 1),))
found = str(found.device.type), found.tolist()
rpc.shutdown()
""",
        timeout_s=90,
    )
    assert own_ranks.pull("found") == {0: ("cuda", [2.0] * 3), 1: ("cuda", [4.0] * 3)}
