"""Long runs of the recorder: 100 000 operations, and ranks without a notebook that end many times."""

from __future__ import annotations

import json
from typing import Any

import psutil
import pytest

import ddp_notebook
from ddp_notebook.records.schema import TABLES
from tests.conftest import wait_until
from tests.recording.scripts import ENDINGS, is_clean, run_endings

pytestmark = pytest.mark.long

_OPERATIONS = 100_000
_PARTS = 10  # the first one warms up allocators, texts and threads of torch
_MOST_RANK_MB = 25.0  # variation caused by the allocator
_MOST_NOTEBOOK_MB = 40.0
_SET_UP = """
import gc, json, os, threading, psutil
from torch.nn.parallel import DistributedDataParallel
from ddp_notebook.rank.engine import RankEngine
_rank = RankEngine.instance()._rank
_recorder, _event_buffer = _rank._network.recorder, _rank._core.recording.event_buffer
_process = psutil.Process()
groups = [dist.new_group([0, 1]) for _ in range(2)]
mine = [dist.new_group([0]), dist.new_group([1])][rank]
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)]))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

def one(n, group):
    x, peer, kind = torch.full((n % 50,), 1.0), 1 - rank, n % 10
    if kind == 0: dist.all_reduce(x, group=group)
    elif kind == 1: dist.all_reduce(x, group=group, async_op=True).wait()
    elif kind == 2: dist.all_reduce(x, group=group, async_op=True)  # nobody waits
    elif kind == 3: dist.all_gather([torch.empty_like(x), torch.empty_like(x)], x, group=group)
    elif kind == 4: dist.broadcast(x, 0, group=group)
    elif kind == 5:
        first, second = (dist.send, dist.recv) if rank == 0 else (dist.recv, dist.send)
        first(x, peer, group=group); second(x, peer, group=group)
    elif kind == 6:
        for work in [dist.isend(x, peer, group=group), dist.irecv(torch.empty_like(x), peer, group=group)]: work.wait()
    elif kind == 7: dist.reduce_scatter(torch.empty(3), [torch.ones(3), torch.ones(3)], group=group)
    elif kind == 8: dist.all_reduce(x, group=mine)
    elif n % 100 == 9: dist.all_gather_object([None, None], {"n": n}, group=group)
    else: dist.barrier(group=group)

def many(count, group):
    n = 0
    while group.done < count:
        one(n, group.group); n += 1; group.done += 1

def train(count):
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()

class Share:
    def __init__(self, group): self.group, self.done = group, 0

def part(count):
    thread = threading.Thread(target=many, args=(count // 2, Share(groups[1])))
    thread.start()
    train(count // 40)
    many(count // 2, Share(groups[0]))
    thread.join()
    dist.barrier()

def state():
    gc.collect()
    _recorder.prune()
    return json.dumps({
        "rss": _process.memory_info().rss, "threads": _process.num_threads(), "begun": _recorder.begun,
        "fds": _process.num_fds(),
        "left": [len(_recorder.live), len(_recorder.by_work), len(_recorder.unwaited), len(_recorder.waiting)],
        "event_buffer": len(_event_buffer), "dropped": _event_buffer.dropped,
    })
"""


def test_100_000_operations_leave_nothing(tally):
    """Synchronous and asynchronous, point to point, in sub-groups, of objects and of DDP, from two threads."""
    what = f"{_OPERATIONS} mixed operations on each of 2 ranks leave no memory, operation or thread behind"
    for _ in tally(1, what):
        with ddp_notebook.start(2, guard=False) as session:
            session.run(_SET_UP, quiet=True)
            first = _part(session)
            notebook, rows = psutil.Process(), _nbytes(session)
            before_mb = notebook.memory_info().rss / 1e6
            for _ in range(_PARTS - 1):
                last = _part(session)
            grown_mb = notebook.memory_info().rss / 1e6 - before_mb - (_nbytes(session) - rows) / 1e6
            recording = session.recording
            for rank, (old, new) in enumerate(zip(first, last, strict=True)):
                grown_by = (new["rss"] - old["rss"]) / 1e6
                print(f"rank {rank}: {new['begun']} operations, {grown_by:+.1f} MB; notebook {grown_mb:+.1f} MB")
                assert new["left"] == [0, 0, 0, 0] and new["event_buffer"] == new["dropped"] == 0
                assert new["threads"] <= old["threads"] and new["fds"] <= old["fds"]
                assert grown_by < _MOST_RANK_MB
                calls = recording.rows("call")
                mine = calls["call"][calls["rank"] == rank]
                assert len(mine) >= _OPERATIONS and len(set(mine.tolist())) == len(mine), "each of them once"
                assert len(mine) == new["begun"] - old["begun"] + old["rows"]
            assert grown_mb < _MOST_NOTEBOOK_MB
            assert recording.dropped == {}


def _part(session: Any) -> list[dict[str, Any]]:
    session.run(f"part({_OPERATIONS // _PARTS})", quiet=True, timeout_s=600)
    states: list[dict[str, Any]] = []

    def is_quiet() -> bool:
        session.run("seen = state()", quiet=True)
        states[:] = [json.loads(seen) for seen in session["seen"].values()]
        return all(one["event_buffer"] == 0 for one in states)

    wait_until(is_quiet, timeout_s=10, what="the event_buffer is empty")
    calls = session.recording.rows("call")
    return [{**one, "rows": int((calls["rank"] == rank).sum())} for rank, one in enumerate(states)]


def _nbytes(session: Any) -> int:
    """Return the size of the recording's tables, which are bounded."""
    recording = session.recording
    return sum(len(recording.store.rings[name]) * dtype.itemsize for name, dtype in TABLES.items())


def test_ranks_without_a_notebook_end_as_they_should(tally, tmp_path):
    hows = list(ENDINGS)
    passes = tally(50, "ranks that record into files end with the right status, without abort or hang")
    ended: dict[str, Any] = {}
    for n in passes:
        how, directory = hows[n % len(hows)], tmp_path / str(n // len(hows))
        if n % len(hows) == 0:
            ended = run_endings(directory, hows)
        assert is_clean(ended[how], ENDINGS[how]), (how, ended[how])
        recording = ddp_notebook.load(directory / how)
        assert [len(recording.steps(rank=rank)) for rank in (0, 1)] == [2, 2]
