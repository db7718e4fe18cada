"""Workers of one `init_rpc`, with the names and ranks that the cell assigned.

An agent keeps its name and number as long as its process. A cell assigns new names at each `init_rpc`. Programs only
see these names: in `get_worker_info`, as targets of calls, and as owners of remote references.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch._C._distributed_rpc import WorkerInfo

from ddp_notebook.rank.rpc.rpc_agent import Worker


class WorkerNames:
    """Workers of one `init_rpc`.

    Args:
        mine: worker of this process.
        workers: all workers.

    Raises:
        RuntimeError: two workers have the same name.
    """

    def __init__(self, mine: Worker, workers: Sequence[Worker]) -> None:
        self.mine = mine
        self.workers = {one.name: one for one in workers}
        self.by_number = {one.number: one for one in workers}
        self.by_rank = {one.rank: one for one in workers}
        self.words = {one.number: words_of(one) for one in workers}
        self.infos = {one.name: one.info for one in workers}
        for one in workers:
            if self.workers[one.name] is not one:
                raise RuntimeError(
                    f"init_rpc: rank {one.rank} and rank {self.workers[one.name].rank} are both named {one.name!r}; "
                    "each worker needs a different name"
                )

    def find(self, to: Any = None) -> Worker:
        """Return the worker that a program refers to.

        Args:
            to: a name, a rank, or a result of `get_worker_info`; None for this process.

        Raises:
            RuntimeError: there is no such worker.
        """
        if to is None:
            return self.mine
        if isinstance(to, WorkerInfo):
            to = to.name
        found = self.workers.get(to) if isinstance(to, str) else self.by_rank.get(to)
        if found is not None:
            return found
        if isinstance(to, int):
            raise RuntimeError(f"no worker has rank {to}: the ranks are 0 to {len(self.workers) - 1}")
        raise RuntimeError(f"no worker is named {to!r}: the workers are {', '.join(self.workers)}")


def words_of(worker: Worker) -> str:
    """Describe a worker for messages: `"worker1 (rank 1)"`."""
    return f"{worker.name} (rank {worker.here})"
