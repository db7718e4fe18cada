"""Rendezvous of the workers of one `init_rpc` at the session's store, at their start and at `shutdown`.

In torch, rank 0 starts a store at a given address. Ranks already have a store, so the address only distinguishes one
rendezvous from another. A cell that is stopped during the wait leaves no state, because the next cell uses another
name.

Values are JSON. Data from a store is never unpickled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore

from ddp_notebook.messages.ranks import Form
from ddp_notebook.rank.group.stores import connect
from ddp_notebook.rank.rpc.rpc_agent import Worker
from ddp_notebook.stdlib import json, time

_LOOK_S = 0.001  # initial polling interval
_LONGEST_LOOK_S = 0.05
_NO_LIMIT_S = 1e6


@dataclass
class WorkerRendezvous:
    """Rendezvous of workers.

    Args:
        here: place of the rank in the session.
        name: unique name of the rendezvous, equal for all its workers.
        rank: RPC rank of this worker.
        world_size: number of workers.
        timeout_s: timeout for the other workers; 0 means no limit.
        loss: returns the exception to raise if a worker has died; otherwise None.
    """

    here: Form
    name: str
    rank: int
    world_size: int
    timeout_s: float
    loss: Callable[[], BaseException | None]
    _store: PrefixStore = field(init=False)
    _rounds: int = 0

    def __post_init__(self) -> None:
        self.timeout_s = self.timeout_s or _NO_LIMIT_S
        self._store = PrefixStore(f"{self.here.store_prefix}/rpc/{self.name}", connect(self.here))
        self._store.set_timeout(timedelta(seconds=self.timeout_s))
        if self._store.add(f"taken/{self.rank}", 1) > 1:
            raise RuntimeError(f"init_rpc: rank={self.rank} is already taken; each worker needs a different rank")

    def exchange(self, value: object, timeout_s: float | None = None, function: str = "init_rpc") -> list[Any]:
        """Send a value to all workers. Return the values of all workers, by rank.

        Args:
            value: a `Worker`, a device, numbers, text, and containers of them. Tuples arrive as lists.
            timeout_s: timeout in seconds; None for `self.timeout_s`; 0 means no limit.
            function: called RPC function, for the error message.

        Raises:
            RuntimeError: a worker did not arrive in time (the message lists missing ranks), or has died.
        """
        self._rounds += 1
        keys = [f"{self._rounds}/{rank}" for rank in range(self.world_size)]
        self._store.set(keys[self.rank], json.dumps(_to_json(value)))
        limit_s = self.timeout_s if timeout_s is None else timeout_s or _NO_LIMIT_S
        until, pause_s = time.monotonic() + limit_s, _LOOK_S
        # The store's own `wait` does not notice dead ranks, and logs to stderr each time it ends.
        while not self._store.check(keys):
            if (loss := self.loss()) is not None:
                raise loss
            if time.monotonic() > until:
                missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                raise RuntimeError(_missing(self.world_size, missing, limit_s, function))
            time.sleep(pause_s)
            pause_s = min(1.2 * pause_s, _LONGEST_LOOK_S)
        return [_of_json(json.loads(one)) for one in self._store.multi_get(keys)]

    def settle(self, calls: Callable[[], tuple[int, int]], timeout_s: float) -> None:
        """Wait until no call between the workers is open. All workers must call this.

        Two consecutive rounds without open calls, and without new calls between them, mean that there are none. A
        message in transit is an open call of its sender.

        Args:
            calls: returns the number of calls made by this worker so far, and the number of open ones.
            timeout_s: as in `exchange`.
        """
        before, until = -1, time.monotonic() + (timeout_s or float("inf"))
        while True:
            while calls()[1] and time.monotonic() < until:
                time.sleep(_LOOK_S)
            told = self.exchange(calls(), timeout_s, "shutdown")
            made = sum(made for made, _ in told)
            if made == before and not any(under_way for _, under_way in told):
                return
            before = made


def _to_json(value: object) -> Any:
    """Convert a value to JSON. Types that JSON lacks become a list of their name and content."""
    if isinstance(value, Worker):
        return ["Worker", {one.name: _to_json(getattr(value, one.name)) for one in dataclasses.fields(value)}]
    if isinstance(value, torch.device):
        return ["device", str(value)]
    if isinstance(value, dict):
        return ["dict", [[_to_json(key), _to_json(one)] for key, one in value.items()]]
    if isinstance(value, list | tuple):
        return ["list", [_to_json(one) for one in value]]
    return value


def _of_json(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    kind, content = value
    if kind == "Worker":
        return Worker(**{name: _of_json(one) for name, one in content.items()})
    if kind == "device":
        return torch.device(content)
    if kind == "dict":
        return {_of_json(key): _of_json(one) for key, one in content}
    return [_of_json(one) for one in content]


def _missing(world_size: int, missing: Sequence[int], limit_s: float, function: str) -> str:
    who = ", ".join(map(str, missing))
    of_size = ", with this world_size" if function == "init_rpc" else ""
    return (
        f"{function}: of the {world_size} workers, rank{'s' * (len(missing) != 1)} {who} did not call it within "
        f"{max(limit_s, 0):g} s; each must call it in the same cell{of_size}"
    )
