"""A session in a real notebook for many faults in a row, and the checks after each of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.faults.table import GRACE_S, HANG_AFTER_S
from tests.kernels import NotebookKernel, Reply
from tests.long.watching import pids_of_ranks
from tests.test_cell_table import by_rank

_ROOT = Path(__file__).parents[2]
_NEXT_S = 20.0  # limit for a cell that must succeed
_SET_UP = """
kept = torch.arange(3) + 10 * rank
words = {{"rank": [rank]}}
import asyncio, concurrent.futures, ctypes, os, sys, threading, time
import torch.distributed.device_mesh, torch.distributed.fsdp
from tests.faults import on_rank
victim = {victim}
scene = on_rank.Scene({directory!r}, rank)
"""
KEPT = "print(kept.tolist(), words['rank'])"
SUM = "x = torch.ones(1024) * (rank + 1); dist.all_reduce(x); print('sum', x.unique().tolist())"
_HOST_SERVERS = "import ddp_notebook; print(*ddp_notebook.current().ranks.pids('host server'))"


class Ranks:
    """Ranks of a notebook, for many entries in a row.

    Args:
        world_size: Number of ranks.
        where: Options of `%ddp_start` that select the hosts of the ranks.
    """

    def __init__(self, world_size: int, where: str = "") -> None:
        self.world_size = world_size
        self._where = where
        self.ended_s: list[float] = []  # duration of each cell
        self._running: NotebookKernel | None = None
        self._children = 0  # number of processes started by the host servers

    @property
    def kernel(self) -> NotebookKernel:
        """Return the kernel of the notebook; a new one after a failed entry."""
        if self._running is None:
            self._running = NotebookKernel(pythonpath=str(_ROOT))
            options = f"--grace {GRACE_S:g} --hang-after {HANG_AFTER_S:g} {self._where}"
            # A cell with DDP may show a picture. The first picture of a notebook imports this for 0.7 s.
            self._running.run("import matplotlib.backends.backend_agg, ddp_notebook.observe.figures.bars")
            started = self._running.run(f"%load_ext ddp_notebook\n%ddp_start {self.world_size} {options}")
            assert started.status == "ok", started
            self._children = len(self._of_host_servers())
        return self._running

    def close(self) -> None:
        """End the notebook. Idempotent."""
        running, self._running = self._running, None
        if running is not None:
            running.close()

    @contextmanager
    def given_up_on_failure(self) -> Iterator[None]:
        """Replace the notebook after a failure in this block."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    # ---- cells

    def run(self, code: str) -> Reply:
        """Run a cell on all ranks, which must succeed."""
        reply = self.kernel.run(f"%%on_all_ranks\n{code}", _NEXT_S)
        assert reply.status == "ok", reply
        return reply

    def set_up(self, directory: str, victim: int = 0, code: str = "") -> list[int]:
        """Set the variables of an entry on the ranks. Return the process ids of the ranks."""
        self.run(_SET_UP.format(victim=victim, directory=directory) + code)
        return self.pids()

    def pids(self) -> list[int]:
        """Return the process ids of the ranks, by rank."""
        return pids_of_ranks(self.kernel)

    def heal(self, victim: int) -> str:
        """Copy the variables of the next rank to the victim's new process. Return the output."""
        source = self._source(victim)
        reply = self.kernel.run(f"%ddp_heal --from {source}", _NEXT_S)
        assert re.search(rf"variables of rank {source} copied to rank {victim}: .*kept", reply.stdout), reply
        return reply.stdout

    def _source(self, victim: int) -> int:
        return (victim + 1) % self.world_size

    # ---- what has to hold

    def check(self, before: list[int], replaced: int | None = None) -> None:
        """Check that the ranks communicate, have their variables, and are the same processes except for a replaced one.

        Args:
            before: Process ids before the fault.
            replaced: Rank with a new process, which has the variables of the next rank.
        """
        everyone = range(self.world_size)
        total = float(sum(rank + 1 for rank in everyone))
        shown = by_rank(self.run(SUM).stdout)
        assert shown == {rank: [f"sum [{total}]"] for rank in everyone}, shown
        has_of = {rank: self._source(rank) if rank == replaced else rank for rank in everyone}
        self.check_kept(self.run(KEPT), has_of)
        pids = self.pids()
        assert {rank for rank in everyone if pids[rank] != before[rank]} == {replaced} - {None}
        states = {psutil.Process(pid).status() for pid in pids}
        assert not {psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED} & states, states
        children = self._of_host_servers()
        assert set(pids) <= {child.pid for child in children}
        assert len(children) == self._children, children

    def check_kept(self, reply: Reply, has_of: dict[int, int]) -> None:
        """Check that the cell `KEPT` has shown on each of these ranks its own variables or those of another rank."""
        shown = by_rank(reply.stdout)
        wanted = {rank: [f"{[10 * of, 10 * of + 1, 10 * of + 2]} [{of}]"] for rank, of in has_of.items()}
        assert shown == wanted, shown

    def _of_host_servers(self) -> list[psutil.Process]:
        """Return the children of the host servers. Hosts of the tests share the processes of this machine."""
        servers = self.kernel.run(_HOST_SERVERS).stdout.split()
        return [child for pid in servers for child in psutil.Process(int(pid)).children()]
