"""Two threads that use one group: a warning at the first overlap, and an error on all ranks if their order differs."""

from __future__ import annotations

import re

import pytest

from ddp_notebook.errors import RankError
from tests.meanings.programs import SETUP

_FOLDER = "import tempfile\nfolder = [tempfile.mkdtemp()]; dist.broadcast_object_list(folder)\n"

# PyTorch's recipe for asynchronous checkpoints, with FSDP.
RECIPE = f"""
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
{_FOLDER}
model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)])
for layer in model: fully_shard(layer)
fully_shard(model)
opt = torch.optim.AdamW(model.parameters())
data, future = torch.randn(8, 64), None
for step in range(6):
    opt.zero_grad(); model(data).sum().backward(); opt.step()
    if future: future.result()
    weights, states = get_state_dict(model, opt)
    future = dcp.async_save({{'model': weights, 'optimizer': states}}, checkpoint_id=f'{{folder[0]}}/{{step}}')
future.result()
"""
BARRIER = f"""
import torch.distributed.checkpoint as dcp
{_FOLDER}
for step in range(6):
    future = dcp.async_save({{'weights': torch.ones(3)}}, checkpoint_id=f'{{folder[0]}}/{{step}}')
    dist.barrier(); dist.barrier()
    future.result()
"""
POOL = """
with ThreadPoolExecutor(1) as pool:
    for step in range(50):
        future = pool.submit(dist.all_gather_object, [None, None], 'x' * 100)
        dist.barrier()
        future.result()
"""
LOOP = """
import threading
def average():
    try:
        for _ in range(300): dist.all_reduce(torch.ones(4))
    except RuntimeError: pass
thread = threading.Thread(target=average); thread.start()
for _ in range(300): dist.all_reduce(torch.ones(7))
thread.join()
"""
BUCKETS = """
model = DDP(nn.Linear(4, 4))
with ThreadPoolExecutor(1) as pool:
    for step in range(200):
        if step > 100: future = pool.submit(dist.all_gather_object, [None, None], 'x')
        model(batch).sum().backward()
    future.result()
"""
PROGRAMS = {
    "async_save with FSDP": (RECIPE, "dcp.async_save(..., process_group=dist.new_group())"),
    "async_save and a barrier": (BARRIER, "dcp.async_save(..., process_group=dist.new_group())"),
    "objects in a thread pool": (POOL, "give one of them its own group: group=dist.new_group()"),
    "a loop in a thread": (LOOP, "give one of them its own group: group=dist.new_group()"),
    "objects in a thread pool, and buckets of DDP": (BUCKETS, "give one of them its own group: group=dist.new_group()"),
}
REASON = re.compile(
    r"CollectiveMismatchError: collective #\d+ of group default is not the same on all ranks: "
    r"rank 0 calls [^;]* in (the main thread|thread '[^']*'); rank 1 calls [^;]* in (the main thread|thread '[^']*')\. "
    r"Two threads use this group, and each rank starts their calls in another order: "
)
OVERLAP = re.compile(
    r"ddp_notebook: (the main thread|thread '[^']*') starts a collective of group default while "
    r"(the main thread|thread '[^']*') is in \w+ #\d+\. Ranks may start them in a different order; "
)


@pytest.fixture(scope="module")
def ranks(session):
    assert session.run(SETUP, timeout_s=60).ok
    return session


def ends_with_a_reason(ranks, code: str, advice: str) -> bool:
    """Run a program. Return whether its threads had another order on each rank; then all ranks must have the reason."""
    try:
        return not ranks.run(code, timeout_s=60).ok
    except RankError as error:  # neither a time-out nor a dead rank
        assert REASON.match(str(error)) and advice in str(error), str(error)
        assert str(error).endswith("the next cell can use the group (ranks 0-1)"), str(error)
        return True
    finally:
        again = ranks.run("y = torch.ones(1); dist.all_reduce(y); int(y)", timeout_s=60)
        assert [one.result for one in again.by_rank.values()] == ["2", "2"]


@pytest.mark.parametrize("name", ["async_save with FSDP", "objects in a thread pool"])
def test_threads_that_use_one_group_get_a_reason(ranks, name, capsys):
    code, advice = PROGRAMS[name]
    if not ends_with_a_reason(ranks, code, advice):  # the order was the same by chance
        said = capsys.readouterr().err
        assert OVERLAP.search(said) and advice in said


@pytest.mark.long
@pytest.mark.parametrize(("code", "advice"), PROGRAMS.values(), ids=PROGRAMS)
def test_a_reason_in_twenty_of_twenty_runs(ranks, code, advice):
    reasons = sum(ends_with_a_reason(ranks, code, advice) for _ in range(20))
    print(f"{reasons} of 20 runs ended with the reason, and {20 - reasons} without a difference")


def test_the_first_overlap_is_reported_once(ranks, capsys):
    code = (
        "import time\ngroup = dist.new_group(group_desc='pair')\n"
        "def wait():\n    if rank == 1: time.sleep(0.3)\n    dist.all_reduce(torch.ones(2), group=group)\n"
        "with ThreadPoolExecutor(1) as pool:\n    for _ in range(2):\n"
        "        future = pool.submit(wait); time.sleep(0.1)\n"
        "        if rank == 0: dist.all_reduce(torch.ones(2), group=group); future.result()\n"
        "        else: future.result(); dist.all_reduce(torch.ones(2), group=group)\n"
    )
    assert ranks.run(code, timeout_s=60).ok
    said = capsys.readouterr().err
    assert said.count("starts a collective") == 1
    assert "[0] ddp_notebook: the main thread starts a collective of group pair while thread 'ThreadPool" in said
    assert "is in all_reduce #1. Ranks may start them in a different order; give one of them its own group" in said
