"""The whole table of faults and states, repeated freeing of deadlocks, and a long series of random faults."""

from __future__ import annotations

import os
import random
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import psutil
import pytest

from tests.conftest import sockets_of
from tests.faults.entries import strike
from tests.faults.harness import Ranks
from tests.faults.on_rank import Scene
from tests.faults.table import AT_ONCE_S, FAULTS, PAIRS

pytestmark = pytest.mark.long

SEED = int(os.environ.get("DDP_NOTEBOOK_SOAK_SEED", "0")) or random.randrange(1, 10**6)
MANY = 64
_SOCKETS_OF_A_GROUP = 8  # for four ranks, including its listeners
# Each rank blocks in another operation. One of them waits for a message, so that no check of collectives is complete.
BLOCKING = [
    "dist.all_reduce(torch.ones(1024))",
    "dist.recv(torch.ones(2), 0)",
    "dist.barrier()",
    "dist.broadcast(torch.ones(8), 1)",
    "dist.all_gather_into_tensor(torch.ones(world_size), torch.ones(1))",
    "dist.send(torch.ones(8_000_000), 0)",
    "dist.reduce_scatter_tensor(torch.ones(1), torch.ones(world_size))",
    "dist.monitored_barrier()",
]


@pytest.fixture
def start() -> Iterator[Callable[[int], Ranks]]:
    """Yield a function that starts ranks, whose notebook is closed after the test."""
    with ExitStack() as stack:
        yield lambda world_size: stack.enter_context(closing(Ranks(world_size)))


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_state(start, tally, world_size, fault):
    states = [state for state, its_fault in PAIRS if its_fault is fault]
    ranks = start(world_size)
    for n in tally(len(states), f"{fault.name} on {world_size} ranks in {len(states)} states: the others continue"):
        strike(ranks, states[n], fault, victim=n % world_size)
    print(f"{fault.name} on {world_size} ranks: the cell ended after at most {max(ranks.ended_s, default=0.0):.2f} s")


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_a_deadlock_is_freed_50_of_50(start, tally, world_size):
    ranks = start(world_size)
    took_s = []
    with tempfile.TemporaryDirectory(prefix="scene-") as directory:
        pids = ranks.set_up(directory)
        for n in tally(50, f"{world_size} ranks, each blocked in another operation, are freed within 1 s"):
            branches = [f"if rank == {at}: {code}" for at, code in enumerate(BLOCKING)]
            code = "\n".join([f"scene.mark('deadlock {n}')", *branches])
            message = ranks.kernel.start(f"%%on_all_ranks\n{code}")
            Scene(directory).wait_for(f"deadlock {n}", range(world_size), blocked=True)
            pressed_at = time.monotonic()
            ranks.kernel.interrupt()
            reply = ranks.kernel.finish(message)
            took_s.append(time.monotonic() - pressed_at)
            assert reply.ename == "KeyboardInterrupt", reply
            assert len(re.findall(r"^ +rank \d waited in ", reply.traceback, re.MULTILINE)) == world_size, reply
            assert took_s[-1] < AT_ONCE_S, took_s
            ranks.check(pids)
    print(f"{world_size} ranks: freed after {statistics.median(took_s):.2f} s, at most {max(took_s):.2f} s")


def _sockets_of(ranks: Ranks) -> list[int]:
    """Return the number of sockets of the notebook and of each rank."""
    return [sockets_of(pid) for pid in (ranks.kernel.pid, *ranks.pids())]


def _rss_mb(pid: int) -> float:
    return psutil.Process(pid).memory_info().rss / 1e6


def test_200_random_faults_in_one_session(start, tally):
    """Every rank dies many times, and a new process has few sockets, so the maximum of all ranks counts."""
    ranks, chance = start(4), random.Random(SEED)
    row = [*PAIRS, *chance.choices(PAIRS, k=200)][-200:]
    chance.shuffle(row)
    survived, rss_mb, sockets = 0, [], []
    kernel = ranks.kernel
    try:
        for n in tally(200, "random faults in one session of 4 ranks; the session continues"):
            state, fault = row[n]
            strike(ranks, state, fault, victim=chance.randrange(4))
            survived += 1
            if survived % 10 == 0:
                rss_mb.append(_rss_mb(kernel.pid))
                sockets.append(_sockets_of(ranks))
        assert ranks.kernel is kernel
        if survived == 200:
            grown_mb = rss_mb[-1] - rss_mb[0]
            of_notebook = [counts[0] for counts in sockets]
            most = [max(counts[1:]) for counts in sockets]
            print(f"sockets of the notebook: {of_notebook}, of a rank at most: {most}")
            print(f"MB of the notebook: {[round(one) for one in rss_mb]}")
            assert of_notebook[-1] <= of_notebook[1]
            assert max(most[10:]) <= max(most[:10]) + _SOCKETS_OF_A_GROUP
            assert grown_mb < 50
    finally:
        worst = max(ranks.ended_s, default=0.0)
        print(f"seed {SEED}: {survived} / 200 survived; a cell ended after at most {worst:.2f} s")


def test_64_ranks_form_their_group_again(start, tally):
    ranks = start(MANY)
    with tempfile.TemporaryDirectory(prefix="scene-") as directory:
        pids = ranks.set_up(directory)
        ranks.check(pids)
        for fault in tally(2, f"{MANY} ranks form their group again within 15 s after a failed collective"):
            scene = Scene(directory)
            failing = (
                f"if rank == 5: scene.mark('failed {fault}'); raise ValueError('bad')\ndist.all_reduce(torch.ones(4))"
            )
            reply = ranks.kernel.run(f"%%on_all_ranks\n{failing}")
            assert reply.ename == "RankError", reply
            ranks.check(pids)
            took_s = time.monotonic() - scene.wait_for(f"failed {fault}", [5])[5][1]
            print(f"{MANY} ranks: an all_reduce was right again {took_s:.1f} s after the failure")
            assert took_s < 15
