"""Ranks that call different collectives get an error before anything is sent."""

from __future__ import annotations

import pytest

from ddp_notebook.errors import RankDiedError, RankError

MISMATCHES = {
    "size": (
        "dist.all_reduce(torch.ones(4 + rank))",
        "rank 0 calls all_reduce(SUM, float32[4]); rank 1 calls all_reduce(SUM, float32[5])",
    ),
    "dtype": (
        "dist.all_reduce(torch.ones(4, dtype=torch.int32 if rank else torch.float32))",
        "rank 0 calls all_reduce(SUM, float32[4]); rank 1 calls all_reduce(SUM, int32[4])",
    ),
    "reduce op": (
        "dist.all_reduce(torch.ones(4), dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)",
        "rank 0 calls all_reduce(SUM, float32[4]); rank 1 calls all_reduce(MAX, float32[4])",
    ),
    "root": (
        "dist.broadcast(torch.ones(4), src=rank)",
        "rank 0 calls broadcast(float32[4], root 0); rank 1 calls broadcast(float32[4], root 1)",
    ),
    "operation": (
        "dist.barrier() if rank else dist.all_reduce(torch.ones(4))",
        "rank 0 calls all_reduce(SUM, float32[4]); rank 1 calls barrier()",
    ),
    "in a sub-group": (
        "g = dist.new_group([0, 1], group_desc='pair'); dist.all_reduce(torch.ones(2 + rank), group=g)",
        "of group pair is not the same on all ranks: rank 0 calls all_reduce(SUM, float32[2])",
    ),
}


@pytest.mark.parametrize(("code", "words"), MISMATCHES.values(), ids=MISMATCHES)
def test_a_mismatch_is_told_on_every_rank_and_the_group_stays(session, code, words):
    epoch = session.ranks.epoch
    with pytest.raises(RankError) as caught:
        session.run(code, timeout_s=20)
    message = str(caught.value)
    assert message.startswith("CollectiveMismatchError: collective #") and words in message
    assert "Nothing was sent, and the group can be used (ranks 0-1)" in message
    assert set(caught.value.summaries) == {0, 1}
    shown = "\n".join(caught.value._render_traceback_())
    assert "recorder.py" not in shown and "c10d" not in shown  # it ends at the user's line
    assert session.ranks.epoch == epoch
    assert session.run("x = torch.ones(1); dist.all_reduce(x); int(x)", timeout_s=20)[1].result == "2"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "dist.all_to_all([torch.zeros(2), torch.zeros(2)], [torch.ones(2), torch.ones(3 if rank == 0 else 2)])",
            "rank 0 sends rank 1 4 bytes more than it receives",
        ),
        (
            "dist.all_to_all_single(torch.zeros(4, 5), torch.ones(4, 5), [2, 2], [1, 3] if rank else [2, 2])",
            "rank 1 sends rank 0 20 bytes less than it receives",
        ),
        (
            "x = torch.ones(5 if rank else 4); dist.all_to_all_single(torch.zeros(len(x)), x)",
            "rank 0 sends rank 1 2 bytes less than it receives",
        ),
    ],
    ids=["a list", "splits", "without splits"],
)
def test_what_does_not_fit_in_an_all_to_all_is_told(session, code, words):
    with pytest.raises(RankError, match=words):
        session.run(code, timeout_s=20)
    assert session.run("x = torch.ones(1); dist.all_reduce(x); int(x)", timeout_s=20)[1].result == "2"


LEGAL = {
    "all_to_all with splits": (
        "out = torch.zeros(3)\n"
        "dist.all_to_all_single(out, torch.ones(2 if rank == 0 else 4), [1, 2] if rank == 0 else [1, 2],"
        " [1, 1] if rank == 0 else [2, 2])"
    ),
    "all_to_all in equal parts": "dist.all_to_all_single(torch.zeros(4, 3), torch.ones(4, 3))",
    "all_to_all that one rank waits for later": (
        "out = torch.zeros(2); w = dist.all_to_all_single(out, torch.ones(2), async_op=rank == 0)\nif w: w.wait()"
    ),
    "a wrapper of the user's own on one rank": (
        "x = torch.ones(1); (torch.no_grad()(dist.all_reduce) if rank == 0 else dist.all_reduce)(x)\n"
        "from torch.distributed.algorithms.model_averaging.utils import average_parameters\n"
        "average_parameters(iter([torch.nn.Parameter(x)]), dist.group.WORLD)"
    ),
    "scatter with lists on one rank": (
        "x = torch.zeros(2); dist.scatter(x, [torch.ones(2)] * 2 if rank == 0 else None, src=0)"
    ),
    "gather with lists on one rank": (
        "x = [torch.zeros(2) for _ in range(2)] if rank == 1 else None; dist.gather(torch.ones(2), x, dst=1)"
    ),
    "objects": (
        "box = [None, None]; dist.all_gather_object(box, 'x' * (1 + 100 * rank))\n"
        "one = ['y' * 50 if rank == 0 else None]; dist.broadcast_object_list(one, src=0)\n"
        "dist.gather_object(rank, [None, None] if rank == 0 else None, dst=0)\n"
        "mine = [None]; dist.scatter_object_list(mine, ['a', 'bcd'] if rank == 0 else [None, None], src=0)"
    ),
    "messages": "dist.send(torch.ones(3), 1) if rank == 0 else dist.recv(torch.ones(3), 0)",
    "async on one rank": (
        "x = torch.ones(3)\nw = dist.all_reduce(x, async_op=rank == 0)\nif w: w.wait()\nassert x[0] == 2"
    ),
    "many async": (
        "ws = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(20)]\nfor w in ws[::-1]: w.wait()"
    ),
    "a monitored barrier": "dist.monitored_barrier()",
    "an async one before a message, in a new group": (
        "g = dist.new_group([0, 1]); x = torch.ones(2)\n"
        "if rank == 0:\n    w = dist.all_reduce(x, group=g, async_op=True); dist.recv(torch.ones(1), 1); w.wait()\n"
        "else:\n    dist.send(torch.ones(1), 0); dist.all_reduce(x, group=g)"
    ),
    "two new groups in another order on each rank": (
        "gs = [dist.new_group([0, 1]) for _ in range(2)]\n"
        "ws = [dist.all_reduce(torch.ones(1), group=g, async_op=True) for g in (gs if rank else gs[::-1])]\n"
        "for w in ws: w.wait()"
    ),
    "a group of the same name after a new beginning": (
        "g = dist.new_group([0, 1]); dist.all_reduce(torch.ones(1), group=g)\n"
        "dist.destroy_process_group(); dist.init_process_group('gloo')\n"
        "g = dist.new_group([0]); x = torch.ones(1)\n"
        "if rank == 0: dist.all_reduce(x, group=g)\n"
        "dist.all_reduce(x)"
    ),
}


@pytest.mark.parametrize("code", LEGAL.values(), ids=LEGAL)
def test_what_is_legal_passes(session, code):
    assert session.run(code, timeout_s=20).ok
    assert session.run("x = torch.ones(1); dist.all_reduce(x); int(x)", timeout_s=20)[0].result == "2"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("dist.send(torch.ones(1), rank + 2)", "rank 2 does not exist: the ranks are 0 to 1 (rank 0)"),
        ("dist.recv(torch.ones(1), -2)", "rank -2 does not exist: the ranks are 0 to 1 (ranks 0-1)"),
        (
            "dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.ones(1), 5)])",
            "rank 5 does not exist: the ranks are 0 to 1 (ranks 0-1)",
        ),
    ],
)
def test_a_message_to_a_missing_rank_is_an_immediate_error(session, code, words):
    """gloo reads memory that it does not own and ends the process, or waits for a store."""
    with pytest.raises(RankError) as caught:
        session.run(code)
    assert words in str(caught.value)
    assert session.run("x = torch.ones(1); dist.all_reduce(x); x.item()")[0].result == "2.0"


@pytest.mark.parametrize(
    "code",
    [
        "dist.all_gather([torch.zeros(2)] * 2, torch.ones(2))",
        "dist.gather(torch.ones(2), [torch.zeros(2)] * 2 if rank == 0 else None)",
    ],
)
def test_a_single_tensor_as_gather_output_is_an_error(session, code):
    with pytest.raises(
        RankError,
        match=r"gather needs a separate tensor for each result, but some of the 2.*pass \[torch.zeros\(2\) for _ in",
    ):
        session.run(code, timeout_s=20)
    assert session.run("x = torch.ones(1); dist.all_reduce(x); int(x)", timeout_s=20)[0].result == "2"
    assert session.run("dist.all_gather([torch.zeros(0)] * 2, torch.zeros(0))", timeout_s=20).ok, "which holds nothing"


def test_of_an_async_operation_its_wait_tells(session):
    with pytest.raises(
        RankError, match=r"all_reduce\(MAX, float32\[4\]\) differs from the collective that another rank calls"
    ):
        session.run(
            "dist.all_reduce(torch.ones(4), list((dist.ReduceOp.SUM, dist.ReduceOp.MAX))[rank], async_op=True).wait()"
        )
    assert session.run("x = torch.ones(1); dist.all_reduce(x); int(x)", timeout_s=20)[0].result == "2"


def test_where_only_some_wait_all_are_told(session):
    with pytest.raises(RankError, match="differs from the collective that another rank calls"):
        session.run("w = dist.all_reduce(torch.ones(4 + rank), async_op=rank == 0)\nif w: w.wait()", timeout_s=20)
    assert session.run("x = torch.ones(1); dist.all_reduce(x); int(x)", timeout_s=20)[0].result == "2"


def test_buckets_of_ddp_are_not_looked_at(session):
    """They overlap with the backward, so no thread may wait for a comparison there."""
    session.run(
        "from ddp_notebook.rank.group.guard import guard\n"
        "seen = []\n"
        "mark = guard._mark\n"
        "guard._mark = lambda call, checked: (seen.append(call.kernel.spec.name), mark(call, checked))[1]\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))\n"
        "for _ in range(3): model(torch.ones(2, 4)).sum().backward()\n"
        "before = list(seen); dist.all_reduce(torch.ones(2)); guard._mark = mark",
        timeout_s=20,
    )
    assert session.run("set(before), seen[len(before):]")[0].result == "({'broadcast'}, ['all_reduce'])"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "for _ in range(3):\n"
            "    model(torch.randn(8, 4)).sum().backward()\n"
            "    if rank == 0:\n"
            "        with torch.no_grad(): model(torch.randn(8, 4))",
            r"rank 0 calls broadcast\(\w+\[\d+\], root 0\) for a model in DDP; rank 1 calls broadcast\(\w+\[\d+",
        ),
        (
            "if rank == 0: model(torch.randn(8, 4))\ndist.barrier()",
            r"rank 0 calls broadcast\(float32\[8\], root 0\) for a model in DDP; rank 1 calls barrier\(\)",
        ),
    ],
    ids=["in the loop", "before a barrier"],
)
def test_a_model_in_ddp_that_one_rank_evaluates_alone_is_told(session, code, words):
    """Its buffers would be matched with other data and end their processes."""
    session.run(
        "from torch import nn\n"
        "model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))"
    )
    with pytest.raises(RankError, match=words) as caught:
        session.run(code, timeout_s=20)
    assert "; to compute on one rank alone, call model.module(x) (ranks 0-1)" in str(caught.value)
    right = code.replace("model(torch.randn(8, 4))\n", "model.module(torch.randn(8, 4))\n")
    right = right.replace("torch.no_grad(): model(", "torch.no_grad(): model.module(")
    assert session.run(right, timeout_s=20).ok and "module" in right


def test_a_stopped_gradient_accumulation_continues(session):
    """Ranks whose last forward was in `no_sync` expect no buffers of rank 0, but the others do."""
    session.run(
        "from torch import nn\n"
        "model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))\n"
        "def step(bad=False):\n"
        "    with model.no_sync(): model(torch.randn(8, 4)).sum().backward()\n"
        "    if bad and rank: raise ValueError('bad batch')\n"
        "    model(torch.randn(8, 4)).sum().backward()\n"
        "step()"
    )
    with pytest.raises(RankError, match="bad batch"):
        session.run("step(bad=True)", timeout_s=20)
    assert session.run("step(); step()", timeout_s=20).ok


def test_threads_may_use_one_group_and_make_their_own(session):
    """Their operations are numbered and compared one after the other, in any order of the threads."""
    code = (
        "import threading\ntotals = []\n"
        "def work():\n"
        "    for group in (None, dist.new_group([0, 1])):\n"
        "        x = torch.ones(4); dist.all_reduce(x, group=group); totals.append(int(x[0]))\n"
        "threads = [threading.Thread(target=work, daemon=True) for _ in range(8)]\n"
        "for thread in threads: thread.start()\n"
        "for thread in threads: thread.join()\n"
        "print(totals)"
    )
    assert session.run(code, timeout_s=20)[0].stdout == f"{[2] * 16}\n"


def test_a_thread_sends_while_the_main_one_waits_in_a_collective(session):
    """The collective may depend on the message."""
    code = """
import sys, threading, traceback
x, message = torch.ones(1), torch.zeros(1)
if rank == 0:
    main, frames = threading.main_thread().ident, sys._current_frames
    def send():
        while not any("guard" in frame.f_code.co_filename for frame, _ in traceback.walk_stack(frames()[main])):
            pass
        dist.send(torch.full((1,), 7.0), 1)
    thread = threading.Thread(target=send)
    thread.start()
    dist.all_reduce(x)
    thread.join()
else:
    dist.recv(message, 0)
    dist.all_reduce(x)
int(x), int(message)
"""
    result = session.run(code, timeout_s=20)
    assert [result[rank].result for rank in (0, 1)] == ["(2, 0)", "(2, 7)"]


@pytest.mark.parametrize("groups", [4, pytest.param(20, marks=pytest.mark.long)])
def test_a_group_is_checked_though_state_is_read_while_it_forms(session, groups):
    """A reply must not store facts about a group before torch has created it."""
    code = f"""
import threading
from ddp_notebook.rank.engine import RankEngine
from ddp_notebook.rank.group.guard.guard import CollectiveMismatchError
network, told = RankEngine.instance()._rank._network, 0
done = threading.Event()
def ask():
    while not done.is_set(): network.state()
thread = threading.Thread(target=ask)
thread.start()
for _ in range({groups}):
    g = dist.new_group([0, 1])
    try: dist.all_reduce(torch.ones(2 + rank), group=g)
    except CollectiveMismatchError: told += 1
    dist.destroy_process_group(g)
done.set(); thread.join()
told
"""
    result = session.run(code, timeout_s=60)
    assert [result[rank].result for rank in (0, 1)] == [str(groups)] * 2


def test_a_call_that_some_have_left_out_is_told_by_its_number(session):
    code = """
from datetime import timedelta
dist.barrier()
if rank == 0:
    try: dist.monitored_barrier(timeout=timedelta(seconds=0.1))
    except RuntimeError: pass
dist.barrier()
"""
    with pytest.raises(RankError, match=r"barrier is collective #\d+ on rank 0 and #\d+ on rank 1 of group default"):
        session.run(code, timeout_s=20)
    assert session.run("x = torch.ones(1); dist.all_reduce(x); int(x)", timeout_s=20)[1].result == "2"


def test_ranks_that_share_no_memory_are_compared_too(session):
    """Ranks on two machines are compared over a private gloo group."""
    code = """
from ddp_notebook.rank.group.guard import guard
memory, guard.MemoryBoard.make = guard.MemoryBoard.make, lambda *_: None
g = dist.new_group([0, 1])
guard.MemoryBoard.make = memory
said = []
for call in (lambda: dist.all_reduce(torch.ones(2 + rank), group=g),
             lambda: dist.all_to_all([torch.zeros(2), torch.zeros(2)], [torch.ones(2), torch.ones(3 - rank)], group=g)):
    try: call()
    except guard.CollectiveMismatchError as error: said.append(str(error))
x = torch.ones(1); dist.all_reduce(x, group=g)
said, int(x)
"""
    result = session.run(code, timeout_s=20)
    for rank in (0, 1):
        said = result[rank].result
        assert "rank 0 calls all_reduce(SUM, float32[2]); rank 1 calls all_reduce(SUM, float32[3])" in said
        assert "rank 0 sends rank 1 4 bytes more than it receives" in said
        assert said.endswith("2)")


MISTAKES = """
import random
from ddp_notebook.rank.group.guard.guard import CollectiveMismatchError
chance, found, wrong = random.Random(SEED), 0, []
TYPES = [torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8]
OPS = [dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT]


def draw():
    return dict(call=chance.choice(["all_reduce", "broadcast", "reduce", "all_gather", "barrier", "scatter"]),
                size=chance.randint(1, 64), dtype=chance.choice(TYPES), op=chance.choice(OPS),
                root=chance.randrange(world_size))


def call(call, size, dtype, op, root):
    x = torch.ones(size, dtype=dtype)
    match call:
        case "all_reduce": dist.all_reduce(x, op)
        case "broadcast": dist.broadcast(x, root)
        case "reduce": dist.reduce(x, root, op)
        case "all_gather": dist.all_gather_into_tensor(x.repeat(world_size), x)
        case "barrier": dist.barrier()
        case "scatter": dist.scatter(x, [x.clone() for _ in range(world_size)] if rank == root else None, root)


MATTERS = {"all_reduce": ["call", "size", "dtype", "op"], "broadcast": ["call", "size", "dtype", "root"],
           "reduce": ["call", "size", "dtype", "op", "root"], "all_gather": ["call", "size", "dtype"],
           "barrier": ["call"], "scatter": ["call", "size", "dtype", "root"]}
for number in range(COUNT):
    right, other, victim = draw(), draw(), chance.randrange(world_size)
    what = chance.choice(MATTERS[right["call"]])
    while other[what] == right[what]:
        other = draw()
    mistake = {**right, what: other[what]}
    for _ in range(number % 3):
        call(**right)  # a line that has agreed before is compared all the same
    try:
        call(**(mistake if rank == victim else right))
        wrong.append((number, victim, right, mistake))
    except CollectiveMismatchError:
        found += 1
    x = torch.ones(3)
    dist.all_reduce(x)
    if x.tolist() != [world_size] * 3:
        wrong.append((number, x))
found, wrong
"""


@pytest.mark.long
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_1000_random_mistakes_are_reported_before_sending(make_session_alone, world_size):
    session = make_session_alone(world_size)
    result = session.run(f"COUNT, SEED = 1000, {world_size}\n{MISTAKES}", timeout_s=240)
    assert [result[rank].result for rank in range(world_size)] == ["(1000, [])"] * world_size
    assert session.ranks.epoch == 1  # no group was formed again


def test_a_wait_for_a_failed_rank_is_interrupted_and_recorded(make_session_alone):
    """Independent of the order of interrupts: each wait is ended by the rank's own interrupt."""
    session = make_session_alone(3)
    for _ in range(6):
        with pytest.raises(RankError, match=r"bad \(rank 2\); interrupted: ranks 0-1\n"):
            session.run("x = torch.ones(2)\nif rank == 2: raise ValueError('bad')\ndist.all_reduce(x)", timeout_s=20)
    with pytest.raises(RankError, match="is not the same on all ranks"):
        session.run("dist.all_reduce(torch.ones(2 + rank))", timeout_s=20)
    calls = session.recording.collectives(op="all_reduce")
    assert sorted((call.cell, call.rank, call.state) for call in calls) == [
        *((cell, rank, "failed") for cell in range(1, 7) for rank in (0, 1)),
        *((7, rank, "failed") for rank in range(3)),
    ]
    assert all(call.blocked_ns > 0 for call in calls)


def test_a_wait_for_a_dead_rank_fails_without_a_grace_period(make_session_alone):
    session = make_session_alone(2, grace_s=None)
    code = """
import os, time
if rank == 1: time.sleep(0.3); os._exit(3)
try: dist.all_reduce(torch.ones(2))
except RuntimeError as error: print("told:", error)
"""
    with pytest.raises(RankDiedError) as caught:
        session.run(code, timeout_s=20)
    assert "told: rank 1 died (exited with status 3)" in session.log(0), caught.value


def test_without_the_guard_gloo_ends_a_rank(make_session_alone):
    """The last test: it replaces the module's session. If it fails, gloo reports this error itself now."""
    session = make_session_alone(2, guard=False)
    with pytest.raises(RankDiedError, match="killed by SIGABRT"):
        session.run("dist.all_reduce(torch.ones(4 + rank))", timeout_s=20)
