"""Ranks on GPUs. Every test works with one GPU and with many. This process never uses CUDA."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import ddp_notebook
from ddp_notebook.errors import RankDiedError, RankError, UsageError
from ddp_notebook.launch import warm
from tests.conftest import marked_processes, wait_until

# A rank needs some seconds for its first CUDA operation.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

_MIB = 1 << 20
_PLACE = """
import os, threading
found = {
    "device": str(device),
    "current": torch.cuda.current_device(),
    "visible": torch.cuda.device_count(),
    "local_rank": local_rank,
    "in_main_thread": threading.current_thread() is threading.main_thread(),
    "backend": dist.get_backend(),
}
"""
_ALL_REDUCE = """
x = torch.full((1 << 20,), float(rank + 1), device=device)  # (2**20,)
dist.all_reduce(x)
torch.cuda.synchronize()
"""
_DDP_STEP = """
import time
from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(rank)  # DDP gives every rank the parameters of rank 0
model = DistributedDataParallel(torch.nn.Linear(8, 4).to(device), device_ids=[device.index])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
before = [p.detach().clone() for p in model.parameters()]
model(torch.randn(16, 8, device=device)).square().mean().backward()
optimizer.step()
torch.cuda.synchronize()
began_s = time.perf_counter()
for _ in range(100):
    model(torch.randn(16, 8, device=device)).square().mean().backward()
    optimizer.step()
torch.cuda.synchronize()
step_ms = (time.perf_counter() - began_s) * 10  # of one of the 100
moved = [not torch.equal(p, q) for p, q in zip(model.parameters(), before)]
parameters = [p.detach() for p in model.parameters()]
del model, optimizer, before
"""


def driver_says(query: str) -> list[str]:
    """Return the output lines of nvidia-smi."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split("\n")[:-1]


def gpu_memory_mib() -> list[int]:
    """Return the used memory of each GPU of the machine."""
    return [int(line) for line in driver_says("--query-gpu=memory.used") if line.strip().isdigit()]


def has_cuda(pid: int) -> bool:
    """Return whether a process has initialised CUDA: then the driver's device files are mapped into it.

    NVML opens these files without mapping them (driver 580). This also works in a container, where nvidia-smi shows
    other process ids.
    """
    return "/dev/nvidia" in Path(f"/proc/{pid}/maps").read_text()


@pytest.fixture
def warm_server() -> Iterator[None]:
    """Provide an idle host server for every session of the test, as after `%load_ext`."""
    warm.prepare()
    yield
    warm.drop()


def test_by_default_there_is_a_rank_on_every_gpu(make_session, gpus, record_property):
    said: list[str] = []
    began_s = time.monotonic()
    session = make_session(None, report=said.append)
    assert not any("spawned" in line for line in said), said  # the driver has left no thread in the host server
    record_property("started after", f"{time.monotonic() - began_s:.2f} s")
    assert (session.world_size, session.backend) == (len(gpus), "nccl")
    session.run(_PLACE)
    for rank, found in session.pull("found").items():
        assert found == {
            "device": f"cuda:{rank}",
            "current": rank,
            "visible": len(gpus),
            "local_rank": rank,
            "in_main_thread": True,
            "backend": "nccl",
        }
    session.run(_ALL_REDUCE)
    for x in session.pull("x").values():
        assert x.device.type == "cpu"
        assert x.unique().tolist() == [sum(range(1, len(gpus) + 1))]
    for row, name in zip(session.status().rows, gpus, strict=True):
        assert (row.device, row.device_name) == (f"cuda:{row.rank}", name)
        assert (row.device_bytes or 0) >= 4 * _MIB


def test_the_current_device_is_correct_after_await_and_in_px(make_session):
    """The current device belongs to a thread, so the thread that runs cells counts."""
    session = make_session(None)
    session.run("import asyncio\nawait asyncio.sleep(0)\ncurrent = torch.cuda.current_device()")
    assert session.pull("current") == {rank: rank for rank in range(session.world_size)}
    seen = session.client[:].apply_sync(lambda: __import__("torch").cuda.current_device())
    assert seen == list(range(session.world_size))


def test_a_ddp_step_over_nccl(make_session, record_property):
    session = make_session(None)
    session.run(_DDP_STEP)
    _expect_equal_parameters(session)
    record_property("a recorded step of", f"{max(session.pull('step_ms').values()):.2f} ms")


def test_a_ddp_step_on_one_gpu_that_two_ranks_share(make_session, record_property):
    session = make_session(2, gpus=("0",), share_gpus=True)
    assert session.backend == "gloo"
    session.run(_PLACE)
    places = [(found["device"], found["current"], found["local_rank"]) for found in session.pull("found").values()]
    assert places == [("cuda:0", 0, 0), ("cuda:0", 0, 1)]
    session.run(_ALL_REDUCE)
    assert [x.unique().tolist() for x in session.pull("x").values()] == [[3.0], [3.0]]
    session.run(_DDP_STEP)
    _expect_equal_parameters(session)
    record_property("a recorded step of", f"{max(session.pull('step_ms').values()):.2f} ms")


def test_gloo_does_not_end_ranks_that_send_tensors_of_a_gpu(make_session):
    session = make_session(2, gpus=("0",), share_gpus=True)
    for call in ("dist.send(x, 1 - rank)", "dist.recv(x, 1 - rank)", "all_gather_tensor(x, 0, dist.group.WORLD)"):
        words = r"gloo cannot send GPU tensors.*x\.cpu\(\).*--backend nccl"
        with pytest.raises(RankError, match=words):
            session.run(
                "from torch.distributed._functional_collectives import all_gather_tensor\n"
                f"x = torch.ones(4, device=device)\n{call}",
                timeout_s=60,
            )
    assert session.run(_SUM, timeout_s=60)[0].result == "2"


def _expect_equal_parameters(session) -> None:
    assert all(all(moved) for moved in session.pull("moved").values())
    parameters = session.pull("parameters")
    for mine in parameters.values():
        assert all(p.equal(q) for p, q in zip(mine, parameters[0], strict=True))


def test_two_ranks_on_one_gpu_are_refused(gpus):
    words = r"2 ranks on 1 GPU: NCCL refuses two ranks on one GPU \('Duplicate GPU detected'\).*--share-gpus"
    with pytest.raises(UsageError, match=words):
        ddp_notebook.start(2, gpus=("0",))
    many = len(gpus) + 1
    with pytest.raises(UsageError, match=rf"{many} ranks on {len(gpus)} GPU.*Start at most {len(gpus)}"):
        ddp_notebook.start(many)
    assert ddp_notebook.current() is None


def test_a_gpu_is_chosen_by_number_and_by_uuid(make_session, gpus):
    """Use the last GPU, which is not the default."""
    last = len(gpus) - 1
    session = make_session(None, gpus=(str(last),))
    session.run("uuid = str(torch.cuda.get_device_properties(device).uuid)\nplace = str(device), world_size")
    (uuid,) = session.pull("uuid").values()
    assert session.pull("place") == {0: ("cuda:0", 1)}
    session.stop()

    session = make_session(None, gpus=(f"GPU-{uuid.removeprefix('GPU-')}",))
    session.run("again = str(torch.cuda.get_device_properties(device).uuid)")
    assert session.pull("again") == {0: uuid}


def test_the_host_server_has_no_cuda_context(make_session):
    session = make_session(None)
    session.run(_ALL_REDUCE)
    (server,) = session.ranks.pids("host server")
    ranks = session.ranks.pids()
    assert all(map(has_cuda, ranks)), "else the next line would prove nothing"
    assert not has_cuda(server)
    assert not has_cuda(os.getpid())
    assert session.client.ids == list(range(session.world_size))
    others = [*session.ranks.pids("store"), *session.ranks.pids("controller")]
    assert len(others) == 2 and not any(map(has_cuda, others))
    known = {int(line) for line in driver_says("--query-compute-apps=pid") if line.strip().isdigit()}
    assert not known & {server, os.getpid(), *others}


def test_nccls_watchdog_only_records(make_session):
    """NCCL's watchdog would end the process before the session can report the waiting ranks."""
    session = make_session(None)
    session.run(
        "import os\n"
        "names = 'TORCH_NCCL_ASYNC_ERROR_HANDLING', 'TORCH_NCCL_ENABLE_MONITORING'\n"
        "values = [os.environ.get(name) for name in names]"
    )
    assert list(session.pull("values").values()) == [["0", "0"]] * session.world_size


def test_after_stop_no_process_holds_a_gpu(warm_server, make_session, record_property):
    before_mib = gpu_memory_mib()
    if not before_mib:
        pytest.skip("the driver does not say how much memory is in use")
    session = make_session(None)
    session.run("held = torch.ones(512 << 18, device=device)  # 512 MiB\ntorch.cuda.synchronize()")
    ranks = session.ranks.pids()
    wait_until(lambda: sum(gpu_memory_mib()) > sum(before_mib) + 400, what="the ranks take memory")
    session.stop()
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    left = marked_processes()
    assert left, "the host server waits"
    assert not any(has_cuda(process.pid) for process in left)
    wait_until(lambda: sum(gpu_memory_mib()) < sum(before_mib) + 100, what="the driver has the memory back")
    record_property("in use before and after", f"{sum(before_mib)} and {sum(gpu_memory_mib())} MiB")


def test_the_same_host_server_serves_again_after_cuda_was_used(warm_server, make_session):
    """If CUDA were initialised in the host server, the first CUDA operation of every forked rank would fail."""
    servers = []
    for _ in range(2):
        session = make_session(None)
        session.run(_ALL_REDUCE)
        assert {x.max().item() for x in session.pull("x").values()} == {sum(range(1, session.world_size + 1))}
        servers += session.ranks.pids("host server")
        session.stop()
    assert servers[0] == servers[1]


_SUM = "x = torch.ones(1, device=device); dist.all_reduce(x); int(x)"


def test_a_rank_with_a_corrupted_cuda_context_dies_and_is_healed(make_session):
    session = make_session(None)
    session.run("kept = rank")
    with pytest.raises(RankDiedError, match=r"exited with status 1 \(rank 0\)") as caught:
        session.run(
            "if rank == 0:\n"
            "    torch.zeros(2, device=device)[torch.tensor([5], device=device)]; torch.cuda.synchronize()",
            timeout_s=60,
        )
    assert "this process can no longer use its GPU" in "\n".join(caught.value.tracebacks[0])
    session.ranks.heal()
    assert session.run(_SUM, timeout_s=120)[0].result == str(session.world_size)
