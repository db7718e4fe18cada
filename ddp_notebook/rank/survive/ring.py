"""Private connections between the ranks of a survivable loop, which are not recorded.

The copy of each rank goes to the next rank, so a step costs the same on 64 ranks as on 2. Aborting connections also
ends these waits. The bytes are pickles, so each message starts with a MAC.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions, ProcessGroupGloo
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # exported at run time

from ddp_notebook.messages.ranks import Form
from ddp_notebook.rank.group import authentication
from ddp_notebook.rank.group.connections.abort import Connections
from ddp_notebook.rank.group.stores import connect
from ddp_notebook.rank.hide_from_profiler import unseen

_TIMEOUT = timedelta(days=1)  # a slow step must not time out; a stop or a death ends the wait
_SIZE_TAG, _DATA_TAG = 1, 2


class RingConnections:
    """Connections between all ranks of a group, created on all of them at the same time.

    Args:
        place: place of this rank in the group.
        number: number of the ring in this group.
        connections: connections of this process, with which waits are aborted.

    Raises:
        Exception: any error of torch if ranks do not connect.
    """

    def __init__(self, place: Form, number: int, connections: Connections) -> None:
        self.rank, self.size = place.rank, place.world_size
        self._connections = connections
        with connections.waiting_unseen():
            store = PrefixStore(f"{place.store_prefix}/{place.epoch}/ring{number}", connect(place))
            if self.rank == 0:
                authentication.publish_key(store)
            self._group: Any = ProcessGroupGloo(store, self.rank, self.size, timeout=_TIMEOUT)
            self._key = authentication.key_of(store)
        self._least = AllreduceOptions()
        self._least.reduceOp = dist.ReduceOp.MIN  # type: ignore[assignment]  # torch's stub: its own enum

    def pass_on(self, data: bytes) -> bytes:
        """Send bytes to the next rank. Return the bytes from the previous rank.

        Raises:
            NotAuthenticError: the bytes are not from that rank.
        """
        return unseen(self._pass_on, data)

    def _pass_on(self, data: bytes) -> bytes:
        to, of = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        with self._connections.waiting_unseen():
            coming, sealed = np.zeros(1, np.int64), self._sealed(data)
            self._wait(
                self._group.send([_as_tensor(np.array([len(sealed)]))], to, _SIZE_TAG),
                self._group.recv([_as_tensor(coming)], of, _SIZE_TAG),
            )
            taken = np.empty(int(coming[0]), np.uint8)
            self._wait(
                self._group.send([_as_tensor(sealed)], to, _DATA_TAG),
                self._group.recv([_as_tensor(taken)], of, _DATA_TAG),
            )
        return self._opened(taken, of)

    def send(self, to: int, data: bytes) -> None:
        """Send bytes to one rank, which calls `receive`."""
        sealed = self._sealed(data)
        with self._connections.waiting_unseen():
            self._wait(self._group.send([_as_tensor(np.array([len(sealed)]))], to, _SIZE_TAG))
            self._wait(self._group.send([_as_tensor(sealed)], to, _DATA_TAG))

    def receive(self, of: int) -> bytes:
        """Receive bytes from one rank.

        Raises:
            NotAuthenticError: the bytes are not from that rank.
        """
        with self._connections.waiting_unseen():
            coming = np.zeros(1, np.int64)
            self._wait(self._group.recv([_as_tensor(coming)], of, _SIZE_TAG))
            taken = np.empty(int(coming[0]), np.uint8)
            self._wait(self._group.recv([_as_tensor(taken)], of, _DATA_TAG))
        return self._opened(taken, of)

    def _sealed(self, data: bytes) -> npt.NDArray[np.uint8]:
        sealed = np.empty(authentication.MAC_BYTES + len(data), np.uint8)
        sealed[: authentication.MAC_BYTES] = np.frombuffer(authentication.mac(self._key, [data]), np.uint8)
        sealed[authentication.MAC_BYTES :] = np.frombuffer(data, np.uint8)
        return sealed

    def _opened(self, sealed: npt.NDArray[np.uint8], of: int) -> bytes:
        mac, data = sealed[: authentication.MAC_BYTES].tobytes(), sealed[authentication.MAC_BYTES :].tobytes()
        authentication.check(self._key, mac, [data], f"rank {of}")
        return data

    def agree_on(self, number: int, wish: bool) -> tuple[bool, bool]:
        """Wait until all ranks have called this.

        Return whether all numbers are equal, and whether any rank has a wish.
        """
        return unseen(self._agree_on, number, wish)

    def _agree_on(self, number: int, wish: bool) -> tuple[bool, bool]:
        least = np.array((number, -number, -int(wish)))
        if self.size > 1:
            with self._connections.waiting_unseen():
                self._wait(self._group.allreduce([_as_tensor(least)], self._least))
        return int(least[0]) == -int(least[1]), bool(least[2])

    @staticmethod
    def _wait(*works: Any) -> None:
        for work in works:
            work.wait()


def _as_tensor(array: npt.NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(array)
