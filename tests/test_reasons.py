"""Ranks that wait for ranks which have ended the cell: the true reason, at once, and the end of the cell."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time

import pytest

from ddp_notebook import api
from ddp_notebook.errors import RankError
from tests.conftest import wait_until

GRACE_S = 0.5
SOON_S = 1.0  # until the card is shown
LOAD_S = 5.0  # margin for a busy machine
FALSE = ("if it had less data", "Join", "wrap the model", "as many batches", "had no gradients")


@pytest.fixture(scope="module")
def ranks(waiting_host_server):
    waiting_host_server()
    with api.start(2, grace_s=GRACE_S) as running:
        running.run(SETUP, quiet=True)
        yield running


SETUP = """
import threading, time, asyncio
from datetime import timedelta
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
def make(wrap=DDP):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    model = wrap(model) or model
    return model, torch.optim.SGD(model.parameters(), lr=0.1)
def train(model, opt, batches, skip=lambda step: False, lacks=lambda step: False):
    for step, x in enumerate(batches):
        if skip(step): continue
        opt.zero_grad()
        loss = model(x).sum()
        if not lacks(step): loss.backward()
        opt.step()
def loader(batches): return DataLoader(torch.ones(batches * 2, 4), batch_size=2)
"""
_IN = "rank 0 waits in {} #\\d+, and rank 1 has ended the cell without it"
_STEPS = ": rank 1 has made {}, and rank 0 waits after 2 steps"
_TO_0 = "rank 0 waits in recv #\\d+, and rank 1 has ended the cell without a send to rank 0{}"
HANGS = {  # program -> the reason
    "a collective on one rank": ("if rank == 0: dist.all_reduce(torch.ones(3))", _IN.format("all_reduce")),
    "a collective on one rank, in a function": (
        "def log(): dist.barrier()\nfor step in range(3):\n    if step == rank + 1: break\n"
        "    dist.barrier()\nif rank: pass\n"
        "else: log(); log()",
        _IN.format("barrier"),
    ),
    "a rank that leaves early": (
        "def work():\n    for step in range(4):\n        if rank == 1 and step == 2: return\n"
        "        dist.barrier()\nwork()",
        _IN.format("barrier"),
    ),
    "a caught error": (
        "try:\n    if rank: raise ValueError\n    dist.broadcast(torch.ones(2), 1)\nexcept ValueError: pass",
        _IN.format("broadcast"),
    ),
    "objects": ("if rank == 0: dist.all_gather_object([None] * 2, 'x')", _IN.format("all_gather")),
    "a receive without a send": ("if rank == 0: dist.recv(torch.ones(2), 1)", _TO_0.format("")),
    "a batch without a send": (
        "ops = [dist.P2POp(dist.irecv, torch.ones(2), 1 - rank)]\n"
        "if rank == 0: ops.append(dist.P2POp(dist.isend, torch.ones(2), 1))\n"
        "for work in dist.batch_isend_irecv(ops): work.wait()",
        _TO_0.format(""),
    ),
    "another tag": (
        "kept = dist.isend(torch.ones(2), 0, tag=5) if rank else None\n"
        "if rank == 0: dist.recv(torch.ones(2), 1, tag=6)",
        _TO_0.format(" with tag 6") + "; it has sent one with tag 5",
    ),
    "a receive from any rank": ("if rank == 0: dist.recv(torch.ones(2))", _TO_0.format("")),
    "a second receive": (
        "for _ in range(2 - rank):\n    dist.send(torch.ones(2), 0) if rank else dist.recv(torch.ones(2), 1)",
        _TO_0.format(""),
    ),
    "a send without a receive": (
        "if rank == 0: dist.send(torch.ones(5_000_000), 1)",
        "rank 0 waits in send #\\d+, and rank 1 has ended the cell without a receive from rank 0",
    ),
    "a skipped batch": (
        "train(*make(), torch.ones(3, 2, 4), skip=lambda step: rank == 1 and step == 1)",
        _IN.format("all_reduce") + _STEPS.format("2 optimizer steps"),
    ),
    "a skipped batch of a loader": (
        "train(*make(), loader(3), skip=lambda step: rank == 1 and step == 1)",
        _IN.format("all_reduce") + _STEPS.format("2 optimizer steps with 3 batches"),
    ),
    "a batch without a gradient": (
        "train(*make(), loader(3), lacks=lambda step: rank == 1 and step == 1)",
        _IN.format("all_reduce") + _STEPS.format("3 optimizer steps with 3 batches and 2 backward passes"),
    ),
    "less data in DDP": (
        "train(*make(), loader(3 - rank))",
        _IN.format("all_reduce")
        + _STEPS.format("2 optimizer steps with 2 batches")
        + re.escape(
            ". The data of rank 1 ended after 2 batches, and rank 0 has taken 3: put `with Join([model]):` around the "
            "loop, or give all ranks as many batches"
        ),
    ),
    "a loop over epochs that one rank leaves": (
        "model, optimizer = make()\ndata = loader(2)\nfor epoch in range(3):\n"
        "    train(model, optimizer, data)\n    if rank == 1: break",
        _IN.format("all_reduce") + _STEPS.format("2 optimizer steps with 2 batches"),
    ),
    "less data in the second epoch": (
        "model, optimizer = make()\nfor epoch in range(2): train(model, optimizer, loader(3 - rank * epoch))",
        _IN.format("all_reduce")
        + ": rank 1 has made 5 optimizer steps with 5 batches, and rank 0 waits after 5 steps"
        + re.escape(
            ". The data of rank 1 ended after 2 batches, and rank 0 has taken 3: put `with Join([model]):` around the "
            "loop, or give all ranks as many batches"
        ),
    ),
    "less data in FSDP": (
        "train(*make(fully_shard), loader(3 - rank))",
        _IN.format("all_gather_single")
        + _STEPS.format("2 optimizer steps with 2 batches")
        + ". The data of rank 1 ended after 2 batches, and rank 0 has taken 3: give all ranks as many batches, because "
        "FSDP supports no Join",
    ),
    "a skipped batch in FSDP": (
        "train(*make(fully_shard), loader(3), skip=lambda step: rank == 1 and step == 1)",
        _IN.format("all_gather_single") + _STEPS.format("2 optimizer steps with 3 batches"),
    ),
    "a checkpoint of one rank": (
        "import tempfile\nif rank == 0: dcp.save({'x': torch.ones(2)}, checkpoint_id=tempfile.mkdtemp())",
        "rank 0 waits in \\w+ #\\d+, and rank 1 has ended the cell without it; a distributed checkpoint is saved, and "
        "loaded, by all ranks of its group",
    ),
    "a group of one rank": (
        "if rank == 0: group = dist.new_group()",
        "rank 0 waits in new_group for other ranks; rank 1 has ended the cell",
    ),
}
_QUICK = {
    *("a collective on one rank", "a batch without a send", "another tag", "a skipped batch of a loader"),
    *("a batch without a gradient", "less data in DDP", "a group of one rank"),
}


def check_usable(session) -> None:
    """Check that variables, groups and models are usable after a cell that was ended."""
    code = "x = torch.ones(1); dist.all_reduce(x); group = dist.new_group(); dist.barrier(group); int(x)"
    result = session.run(code, timeout_s=20)
    assert [result[rank].result for rank in (0, 1)] == ["2", "2"]


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in _QUICK else pytest.mark.long) for n in HANGS])
def test_the_reason_is_true_and_the_cell_ends(ranks, capsys, name):
    code, reason = HANGS[name]
    began_s = time.monotonic()
    with pytest.raises(RankError) as caught:
        ranks.run(code)
    took_s = time.monotonic() - began_s
    shown = capsys.readouterr().err
    assert re.search(r"The cell is stopped in \d s\. The stop button ends the cell; every variable is kept\.", shown)
    card = re.search(r"no progress for (\d+) s: (.*)", shown)
    diverged = "(; (line|rank \\d reached line) .*)?"  # the line of the divergence, see tests/divergence
    assert card and re.fullmatch(reason + diverged, card[2]), shown
    assert re.fullmatch(rf"the cell was stopped: {reason}{diverged} \(rank 0\); succeeded: rank 1", str(caught.value))
    told = f"{shown}{caught.value}"
    assert [words for words in FALSE if words in told and words not in reason.replace("\\", "")] == []
    assert GRACE_S < took_s < SOON_S + GRACE_S + LOAD_S
    check_usable(ranks)


GROUPS = {  # programs that make groups on some ranks only
    "of itself": "if rank == 0: group = dist.new_group([0])",
    "subgroups": "if rank == 0: groups = dist.new_subgroups(1)",
    "more often": "for _ in range(1 + rank): group = dist.new_group([rank])",
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "of itself" else pytest.mark.long) for n in GROUPS])
def test_the_cell_after_groups_of_some_ranks_works(ranks, name):
    """torch counts groups, and names the next one after the count."""
    ranks.run(GROUPS[name])
    for _ in range(2):
        check_usable(ranks)


ARRIVES = {  # programs in which a rank has ended the cell, and another rank waits for it, but not in vain
    "a thread": (
        "def work(): time.sleep(1.5); dist.all_reduce(torch.ones(3))\n"
        "if rank: threading.Thread(target=work).start()\nelse: dist.all_reduce(torch.ones(3))"
    ),
    "a thread with a name like ours": (
        "def work(): time.sleep(1.5); dist.all_reduce(torch.ones(3))\n"
        "if rank: threading.Thread(target=work, name='ddp-server').start()\nelse: dist.all_reduce(torch.ones(3))"
    ),
    "a timer": "if rank: threading.Timer(1.5, dist.barrier).start()\nelse: dist.barrier()",
    "a task": (
        "async def work(): await asyncio.sleep(1.5); dist.barrier()\n"
        "if rank: task = asyncio.get_running_loop().create_task(work())\nelse: dist.barrier()"
    ),
    "an executor": (
        "from concurrent.futures import ThreadPoolExecutor\npool = ThreadPoolExecutor(1)\n"
        "def work(): time.sleep(1.5); dist.barrier()\nif rank: done = pool.submit(work)\nelse: dist.barrier()"
    ),
    "a message that was sent": (
        "kept = torch.ones(5_000_000)\nif rank: work = dist.isend(kept, 0)\n"
        "else:\n    time.sleep(1.5); dist.recv(torch.empty(5_000_000), 1)"
    ),
    "a receive that has begun": (
        "kept = torch.ones(5_000_000)\nif rank: work = dist.irecv(kept, 0)\nelse:\n"
        "    time.sleep(1.5); dist.send(kept, 1)"
    ),
    "a collective that has begun": (
        "kept = torch.ones(3)\nwork = dist.all_reduce(kept, async_op=True)\nif rank == 0: time.sleep(1.5); work.wait()"
    ),
    "a rank that computes alone": "if rank == 0: time.sleep(2)",
    "a time limit of the operation": (
        "group = dist.new_group(timeout=timedelta(seconds=2))\n"
        "if rank == 0:\n    try: dist.barrier(group)\n    except RuntimeError: kept = 'caught'"
    ),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in ("a thread", "a message that was sent") else pytest.mark.long) for n in ARRIVES],
)
def test_a_rank_that_still_acts_is_waited_for(ranks, capsys, name):
    ranks.run(ARRIVES[name])
    shown = capsys.readouterr().err
    if name == "a time limit of the operation":
        assert re.search(r"rank 0 waits in barrier #\d+, and rank 1 has ended the cell without it", shown)
        assert ranks.run("kept")[0].result == "'caught'"
    else:
        assert "no progress" not in shown
    check_usable(ranks)


@pytest.mark.long
def test_a_rank_that_serves_calls_is_waited_for(ranks, capsys):
    ranks.run(
        "from torch.distributed import rpc\nrpc.init_rpc(f'w{rank}', rank=rank, world_size=2)\n"
        "def serve(): time.sleep(1.5); dist.send(torch.ones(1), 0)"
    )
    ranks.run("if rank == 0: f = rpc.rpc_async('w1', serve); dist.recv(torch.ones(1), 1); f.wait()")
    assert "no progress" not in capsys.readouterr().err
    ranks.run("rpc.shutdown()")


@pytest.mark.long
def test_a_job_ends_too(ranks):
    job = ranks.submit("if rank == 0: dist.barrier()", quiet=True)
    with pytest.raises(RankError, match=r"rank 0 waits in barrier #\d+, and rank 1 has ended the cell without it"):
        job.result(20)
    check_usable(ranks)


def press_stop(session, after_s: float = 0.0) -> None:
    def press() -> None:
        wait_until(lambda: session._cells.watched is not None, 20)
        time.sleep(after_s)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press).start()


STORES = {  # waits at stores of the user, for which other programs may be clients too
    "missing clients": (
        "store = dist.TCPStore('localhost', {port}, 2, is_master=True) if rank == 0 else None",
        r"rank 0 waits in TCPStore for world_size=2 processes to connect to localhost:\d+; rank 1 has ended the cell",
    ),
    "no server": (
        "store = dist.TCPStore('localhost', {port}, 2, is_master=False) if rank == 0 else None",
        r"rank 0 waits in TCPStore for a server at localhost:\d+, where none listens; rank 1 has ended the cell",
    ),
    "a key": (
        "store = dist.TCPStore('localhost', {port}, is_master=True) if rank == 0 else None\n"
        "if rank == 0: store.get('ready')",
        r"rank 0 waits in store.get for key 'ready'; rank 1 has ended the cell",
    ),
    "several keys": (
        "store = dist.TCPStore('localhost', {port}, is_master=True) if rank == 0 else None\n"
        "if rank == 0: store.wait(['a', 'b'], timedelta(minutes=5))",
        r"rank 0 waits in store.wait for keys 'a' and 'b'; rank 1 has ended the cell",
    ),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "a key" else pytest.mark.long) for n in STORES])
def test_a_wait_at_a_store_has_a_card_and_goes_on(ranks, capsys, name):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    code, reason = STORES[name]
    press_stop(ranks, SOON_S + GRACE_S + 1.5)
    with pytest.raises(KeyboardInterrupt):
        ranks.run(code.format(port=port))
    shown = capsys.readouterr().err
    assert re.search(rf"no progress for \d+ s: {reason}\n", shown), shown
    check_usable(ranks)


@pytest.mark.long
def test_grace_off_shows_the_card_and_goes_on(make_session_alone, capsys):
    session = make_session_alone(2, grace_s=None)
    press_stop(session, 4.0)
    with pytest.raises(KeyboardInterrupt):
        session.run("if rank == 0: dist.barrier()")
    assert re.search(r"in barrier #\d+, and rank 1 has ended the cell without it", capsys.readouterr().err)
    check_usable(session)


@pytest.mark.long
def test_a_call_of_the_client_is_waited_for(make_session_alone, capsys):
    session = make_session_alone(2)
    view = session.client[1]
    call = view.apply_async(
        lambda: (__import__("time").sleep(2), __import__("torch.distributed").distributed.barrier())
    )
    time.sleep(0.2)
    session.run("dist.barrier()", ranks=0)
    call.get(10)
    assert "no progress" not in capsys.readouterr().err


@pytest.mark.long
def test_a_rank_that_computes_during_an_operation_is_not_ended(make_session_alone, capsys):
    """An asynchronous operation may be left alone, although that is wrong."""
    session = make_session_alone(2, grace_s=0.2)
    result = session.run(
        "import time\nuntil = time.monotonic() + 2\nif rank == 0:\n"
        "    work = dist.all_reduce(torch.ones(3), async_op=True)\n"
        "    while time.monotonic() < until: torch.nn.functional.relu(torch.ones(3000, 1000)).sum()"
    )
    assert result.ok and "no progress" not in capsys.readouterr().err
