"""The names that a cell gives workers, over those of their agents.

An agent's name is its process's own, and stays; a cell calls workers what it likes, and another one at each `init_rpc`.
Cells see theirs everywhere: in `get_worker_info`, as the target of a call, as the owner of a remote reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch._C._distributed_rpc import WorkerInfo

from ddp_notebook.rank.rpc.agent import Worker


class Names:
    """The workers of one `init_rpc`.

    Args:
        mine: this process.
        workers: all that there are.

    Raises:
        RuntimeError: two have one name.
    """

    def __init__(self, mine: Worker, workers: Sequence[Worker]) -> None:
        self.mine = mine
        self.workers = {one.name: one for one in workers}
        self._of_agents = {one.agent: one for one in workers}
        self.agents = self._of_agents.keys()
        self.words = {one.agent: f"{one.name} (rank {one.here})" for one in workers}  # by agent
        self.infos = {one.agent: one.of_agent for one in workers}  # as agents know them, by agent
        self.here = {one.agent: one.here for one in workers}  # ranks in the session, by agent
        self._of_numbers = {one.number: one for one in workers}
        for one in workers:
            if self.workers[one.name] is not one:
                raise RuntimeError(
                    f"init_rpc: rank {one.rank} and rank {self.workers[one.name].rank} are both named {one.name!r}; "
                    "each worker has a name of its own"
                )

    def find(self, to: Any = None) -> Worker:
        """The worker that a cell means.

        Args:
            to: a name, a rank, or what `get_worker_info` has returned; None: this process.

        Raises:
            RuntimeError: there is none.
        """
        if to is None:
            return self.mine
        if isinstance(to, WorkerInfo):
            to = to.name
        if isinstance(to, str):
            if (found := self.workers.get(to) or self._of_agents.get(to)) is not None:
                return found
        elif (found := next((one for one in self.workers.values() if one.rank == to), None)) is not None:
            return found
        if isinstance(to, int):
            raise RuntimeError(f"no worker has rank {to}: the ranks are 0 to {len(self.workers) - 1}")
        raise RuntimeError(f"no worker is called {to!r}: they are {', '.join(self.workers)}")

    def of_agent(self, info: WorkerInfo) -> WorkerInfo:
        """What cells call the worker that has this agent; one of an earlier `init_rpc` is called by its agent."""
        found = self.by_agent(info.name)
        return info if found is None else found.info

    def by_agent(self, name: str) -> Worker | None:
        """The worker whose agent has this name; None: one of an earlier `init_rpc`."""
        return self._of_agents.get(name)

    def by_number(self, number: int) -> Worker | None:
        """The worker whose agent has this number; None: one of an earlier `init_rpc`."""
        return self._of_numbers.get(number)
