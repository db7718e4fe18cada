"""Time limits that a debugger holds: one test per operation, with a group whose timeout is 2 s."""

from __future__ import annotations

import re
import socket

import pytest

from tests.conftest import is_within
from tests.debug.driver import Debugged

pytestmark = pytest.mark.long
ALL = "%%on_all_ranks\n"
PROMPT_S = 10
SETUP = f"""{ALL}
import time
from datetime import timedelta
from torch.nn.parallel import DistributedDataParallel as DDP
group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
x = torch.ones(2)
torch.manual_seed(0)
model = DDP(torch.nn.Linear(8, 8), process_group=group)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
def stop():
    breakpoint()
def train(steps, stop_at=None):
    for step in range(steps):
        loss = model(torch.ones(4, 8)).sum()
        if step == stop_at and rank == 0:
            breakpoint()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
STOPS = "if rank == 0: breakpoint()\n"
FSDP = f"""from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))
net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
for part in (*net, net):
    fully_shard(part, mesh=mesh)
for step in range(3):
    loss = net(torch.ones(2, 8)).sum()
    if step == 1:
        {STOPS.strip()}
    loss.backward()"""
LOADER = """import os
from torch.utils.data import DataLoader
class Data:
    def __len__(self): return 2
    def __getitem__(self, i):
        while not os.path.exists('{path}'): time.sleep(0.05)
        return i
if rank == 0:
    breakpoint()
    open('{path}', 'w').close()
else:
    assert len(list(DataLoader(Data(), num_workers=1, timeout=2))) == 2
dist.barrier()"""
OPERATIONS = {
    "a collective": f"{STOPS}dist.all_reduce(x, group=group)",
    "a send": (
        f"{STOPS}y = torch.ones(1 << 20)\ndist.recv(y, 1, group=group) if rank == 0 else dist.send(y, 0, group=group)"
    ),
    "a receive": f"{STOPS}dist.send(x, 1, group=group) if rank == 0 else dist.recv(x, 0, group=group)",
    "DDP in its first step": "train(3, stop_at=0)",
    "DDP in its 3000th step": "train(3010, stop_at=3000)",
    "FSDP": FSDP,
    "an asynchronous operation": f"{STOPS}work = dist.all_reduce(x, group=group, async_op=True)\n"
    "time.sleep(0.1)\nwork.wait()",
    "objects": f"{STOPS}found = [None, None]\ndist.all_gather_object(found, rank, group=group)",
    "monitored_barrier": "if rank == 1: breakpoint()\ndist.monitored_barrier(group, timeout=timedelta(seconds=2))",
    "monitored_barrier on the other ranks": f"{STOPS}dist.monitored_barrier(group)",
    "monitored_barrier, with a function of an earlier cell": "if rank == 0: stop()\ndist.monitored_barrier(group)",
    "a wait with its own limit": (
        f"{STOPS}work = dist.all_reduce(x, group=group, async_op=True)\nwork.wait(timedelta(seconds=2))"
    ),
    "a new group": (
        f"{STOPS}other = dist.new_group([0, 1], timeout=timedelta(seconds=2))\ndist.all_reduce(x, group=other)\n"
        "dist.destroy_process_group(other)"
    ),
    "a DataLoader": LOADER,
    "the session's store": (
        "store = dist.distributed_c10d._get_default_store()\n"
        f"{STOPS}"
        "store.set('found', b'1') if rank == 0 else store.wait(['found'], timedelta(seconds=2))"
    ),
    "a TCPStore": (
        "store = dist.TCPStore('127.0.0.1', {port}, 2, rank == 0, timedelta(seconds=20))\n"
        f"{STOPS}"
        "store.set('found', b'1') if rank == 0 else store.wait(['found'], timedelta(seconds=2))\ndist.barrier()"
    ),
    "a TCPStore without a server": (
        f"{STOPS}store = dist.TCPStore('127.0.0.1', {{port}}, 2, rank == 0, timedelta(seconds=2))\ndist.barrier()"
    ),
}
CONTINUE = {  # limits that cannot be held
    "a TCPStore": (
        "store = dist.TCPStore('127.0.0.1', {port}, 2, rank == 1, timedelta(seconds=30))\ndist.barrier()",
        "TCPStore, which waits for world_size=2 processes to connect to 127.0.0.1:{port}",
    ),
    "a remote call": (
        "from torch.distributed import rpc\nrpc.rpc_sync('a', time.sleep, (3,)) if rank == 1 else None\nrpc.shutdown()",
        "the call of sleep on a (rank 0)",
    ),
}
EXPIRES = {
    "a collective": ("dist.all_reduce(x, group=group)", "all_reduce #"),
    "a backward": ("model(torch.ones(4, 8)).sum().backward()", "all_reduce #"),
    "a receive": ("dist.recv(x, 1, group=group)", "recv #"),
    "an asynchronous operation": ("dist.all_reduce(x, group=group, async_op=True).wait()", "all_reduce #"),
    "monitored_barrier": ("dist.monitored_barrier(group, timeout=timedelta(seconds=2))", "monitored_barrier #"),
}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture(scope="module", params=["on", "off"], ids=["guard on", "guard off"])
def user(kernel, request):
    assert kernel.run(f"%ddp_start 2 --guard {request.param}").status == "ok"
    assert kernel.run(SETUP).status == "ok"
    yield Debugged(kernel)
    kernel.run("%ddp_stop")


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_group_with_2_s_survives_a_prompt_of_10_s(user, name, tmp_path):
    code = OPERATIONS[name].replace("{port}", str(free_port())).replace("{path}", f"{tmp_path}/ready")
    reply = user.run(ALL + code, [f"({PROMPT_S}) c"], 120)
    assert reply.status == "ok", reply.traceback
    assert "time limits run on" not in reply.stderr


@pytest.mark.parametrize("name", CONTINUE)
def test_a_line_names_limits_that_are_not_held(user, name):
    port = str(free_port())
    code, words = (text.replace("{port}", port) for text in CONTINUE[name])
    user.run(f"{ALL}from torch.distributed import rpc\nrpc.init_rpc('ab'[rank], rank=rank, world_size=2)")
    reply = user.run(f"{ALL}if rank == 0:\n    time.sleep(0.5); breakpoint()\n{code}", ["p rank", "c"])
    assert reply.status == "ok", reply.traceback
    assert f"these time limits run on while the debugger waits, on rank 1: {words}\n" in reply.stderr


@pytest.mark.parametrize("name", EXPIRES)
def test_a_real_timeout_of_2_s_names_group_operation_and_rank(user, name):
    """In a cell that may open a debugger."""
    assert user.run(SETUP).status == "ok"
    code, operation = EXPIRES[name]
    reply = user.run(
        f"{ALL}named = 'breakpoint'\nbegan = time.monotonic()\n"
        "try:\n"
        f"    {code} if rank == 0 else time.sleep(3.5)\n"
        "finally:\n"
        "    took = time.monotonic() - began"
    )
    assert reply.ename == "RankError" and "imed out" in reply.evalue
    assert (
        operation in reply.evalue
        and "of group [0,1]" in reply.evalue
        and re.search(r"rank 0 waited|for rank 1", reply.evalue)
    )
    took_s = float(user.run("%%on_ranks 0\ntook").stdout.split()[-1])
    assert took_s >= 1.99 and is_within(took_s, 2.5)
    assert user.run(f"{ALL}y = torch.ones(1); dist.all_reduce(y); y.item()").stdout == "[0-1] 2.0\n"
