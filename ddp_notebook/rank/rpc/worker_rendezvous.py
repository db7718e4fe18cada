"""How the workers of one `init_rpc` find each other, and end together: at the session's store.

Torch has them meet at the address that they are given, where rank 0 starts a store. Ranks have one already, so the
address only tells meetings apart. A cell that is stopped while it waits here leaves nothing behind: the next cell meets
under another name.

Values are JSON. Nothing that was read from a store is unpickled.
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
from ddp_notebook.rank.rpc.agent import Worker
from ddp_notebook.stdlib import json, time

_LOOK_S = 0.001  # at first
_LONGEST_LOOK_S = 0.05
_NO_LIMIT_S = 1e6


@dataclass
class WorkerRendezvous:
    """Workers that have met, or will.

    Args:
        here: the rank's place.
        name: the meeting's, the same for all that take part, and no other's.
        rank: of this worker among them.
        world_size: how many they are.
        timeout_s: what the others get to come; 0: all that they need.
        loss: what is to be raised since one of them has died, if any has.
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
            raise RuntimeError(f"init_rpc: rank={self.rank} is taken; each worker has one of its own, from 0 on")

    def exchange(self, value: object, timeout_s: float | None = None, function: str = "init_rpc") -> list[Any]:
        """Tell all others something. Returns what each has told, by rank.

        Args:
            value: a `Worker`, a device, numbers, text, and containers of them. Tuples arrive as lists.
            timeout_s: seconds that the others get; None: what the meeting gives them; 0: all that they need.
            function: of RPC that the workers call, for the error.

        Raises:
            RuntimeError: not all have come in time, which it names, or one of them has died.
        """
        self._rounds += 1
        keys = [f"{self._rounds}/{rank}" for rank in range(self.world_size)]
        self._store.set(keys[self.rank], json.dumps(_to_json(value)))
        limit_s = self.timeout_s if timeout_s is None else timeout_s or _NO_LIMIT_S
        until, pause_s = time.monotonic() + limit_s, _LOOK_S
        # The store's own `wait` does not see that a rank has died, and says each time on stderr that it has ended.
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
        """Wait until no call is under way between the workers, all of which wait here.

        Two looks in a row that find none, and between which none was made, mean that there is none: a message on its
        way is a call that its sender has not seen return.

        Args:
            calls: how many were made here so far, and how many are under way.
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
    """The value with a list of its type and content in place of whatever JSON does not have."""
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
        f"{function}: of the {world_size} workers, rank{'s' * (len(missing) != 1)} {who} did not come within "
        f"{max(limit_s, 0):g} s; each has to call it in the same cell{of_size}"
    )
