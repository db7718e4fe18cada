"""Operations of all kinds and sizes that are stopped at random moments or lose a peer: none keeps waiting."""

from __future__ import annotations

import random
import time

import psutil
import pytest

from tests.faults.harness import Ranks
from tests.faults.on_rank import Scene
from tests.faults.table import AT_ONCE_S, END_S, GRACE_S
from tests.long.test_faults import SEED, start  # noqa: F401  # a fixture

pytestmark = pytest.mark.long
WORLD_SIZE = 4
_LARGEST = 2**23  # floats: 32 MB, far more than the buffers of a connection
_AFTER_S = 0.05, 0.4
_OPERATIONS = {
    "send to one": "dist.send(x, 1) if rank == 0 else dist.recv(x, 0) if rank == 1 else dist.barrier(behind)",
    "send around": "sent = dist.isend(x, (rank + 1) % world_size); dist.recv(y, (rank - 1) % world_size); sent.wait()",
    "all_reduce": "dist.all_reduce(x)",
    "all_reduce, not waited for": "works = [dist.all_reduce(one, async_op=True) for one in (x, y)]; works[1].wait()",
    "broadcast": "dist.broadcast(x, 0)",
    "all_to_all": "dist.all_to_all_single(y, x)",
    "all_gather": "dist.all_gather(list(y.chunk(world_size)), x[: len(x) // world_size])",
    "DDP": "net(x[:64].view(1, 64)).sum().backward()",
}
_SET_UP = (
    "net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 30_000)); behind = dist.new_group([2, 3])"
)
_CELL = """
x, y = torch.ones({size}), torch.ones({size})
scene.mark("begins {number}")
while True: {operation}
"""


class Operations:
    """Cells that repeat one operation, and how long they took to end."""

    def __init__(self, ranks: Ranks, directory: str) -> None:
        self.ranks, self._directory = ranks, directory
        self._chance = random.Random(SEED)
        self.took_s: list[float] = []
        self._number = 0
        self.pids = ranks.set_up(directory, code=_SET_UP)

    def begin(self) -> tuple[str, str]:
        """Start a cell that is in the middle of an operation. Return the message of the cell, and the operation."""
        self._number += 1
        kind = self._chance.choice(list(_OPERATIONS))
        size = max(64, int(_LARGEST ** self._chance.uniform(0.3, 1.0))) // WORLD_SIZE * WORLD_SIZE
        code = _CELL.format(size=size, operation=_OPERATIONS[kind], number=self._number)
        message = self.ranks.kernel.start(f"%%on_all_ranks\n{code}")
        Scene(self._directory).wait_for(f"begins {self._number}", range(WORLD_SIZE))
        time.sleep(self._chance.uniform(*_AFTER_S))  # random moment
        return message, f"seed {SEED}, number {self._number}: {kind} of {size}"

    def victim(self) -> int:
        return self._chance.randrange(WORLD_SIZE)

    def again(self) -> None:
        """Set up a replaced rank, which lacks the variables of the cells."""
        self.pids = self.ranks.set_up(self._directory, code=_SET_UP)


@pytest.fixture
def operations(start, tmp_path):  # noqa: F811
    return Operations(start(WORLD_SIZE), str(tmp_path))


def test_what_is_stopped_ends_at_once(operations, tally):
    ranks = operations.ranks
    for _ in tally(
        125, f"{WORLD_SIZE} ranks in the middle of an operation of any kind and size are stopped within 1 s"
    ):
        message, what = operations.begin()
        pressed_at = time.monotonic()
        ranks.kernel.interrupt()
        reply = ranks.kernel.finish(message)
        operations.took_s.append(time.monotonic() - pressed_at)
        assert reply.ename == "KeyboardInterrupt" and operations.took_s[-1] < AT_ONCE_S, f"{what}: {reply}"
        ranks.check(operations.pids)
    print(f"seed {SEED}: at most {max(operations.took_s):.2f} s")


def test_what_loses_a_peer_ends_after_the_grace(operations, tally):
    ranks = operations.ranks
    for _ in tally(60, f"{WORLD_SIZE - 1} ranks continue after a peer is killed in the middle of an operation"):
        message, what = operations.begin()
        victim = operations.victim()
        psutil.Process(operations.pids[victim]).kill()
        struck_at = time.monotonic()
        reply = ranks.kernel.finish(message)
        operations.took_s.append(time.monotonic() - struck_at)
        assert reply.ename == "RankDiedError" and operations.took_s[-1] < GRACE_S + END_S, f"{what}: {reply}"
        ranks.heal(victim)
        ranks.check(operations.pids, replaced=victim)
        operations.again()
    print(f"seed {SEED}: at most {max(operations.took_s):.2f} s")
