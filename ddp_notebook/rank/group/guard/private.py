"""A board in a private gloo group of the same ranks, for those that share no machine.

Marks h are compared by one MIN all_reduce of (h, -h): all are equal if the minimum is the maximum. Its cost does not
grow with the ranks as an all_gather's would (3 ms on four).
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions, PrefixStore, ProcessGroupGloo, Store

from ddp_notebook.rank.group.guard.board import Compared
from ddp_notebook.rank.group.guard.messages import Messages


class _Comparison(NamedTuple):
    """One under way."""

    work: Any
    smallest: npt.NDArray[np.int64]  # (3,) the minima of h, of -h, and of whether the caller waits


class PrivateBoard:
    """See `board.Board`. Cutting the connections of gloo cuts this too.

    Args:
        store: of the group.
        rank, size: of the group.
        room: the longest note, in bytes.
        timeout: how long a rank waits for the others, here and later.
    """

    def __init__(self, store: Store, rank: int, size: int, room: int, timeout: timedelta) -> None:
        self.rank, self.size = rank, size
        self.messages: Messages | None = None  # each would take a message more
        self._room = room
        self._group: Any = ProcessGroupGloo(PrefixStore("guard/", store), rank, size, timeout=timeout)
        self._least = AllreduceOptions()
        self._least.reduceOp = dist.ReduceOp.MIN  # type: ignore[assignment]  # torch's stub: its own enum

    def post(self, mark: int, blocks: bool) -> _Comparison:
        smallest = np.array((mark, -mark, int(blocks)))  # NumPy's memory, which no profile of torch's shows
        return _Comparison(self._group.allreduce([torch.from_numpy(smallest)], self._least), smallest)

    def compare(self, ticket: _Comparison) -> Compared:
        ticket.work.wait()
        low, high, all_block = ticket.smallest.tolist()
        return Compared(low == -high, bool(all_block))

    def swap(self, ticket: _Comparison, note: bytes) -> list[bytes]:
        note = note[: self._room]
        mine = torch.zeros(8 + self._room, dtype=torch.uint8)
        framed = len(note).to_bytes(8, "little") + note
        mine[: len(framed)] = torch.frombuffer(bytearray(framed), dtype=torch.uint8)
        everybody = [torch.empty_like(mine) for _ in range(self.size)]
        self._group.allgather([everybody], [mine]).wait()
        raw = [bytes(one.tolist()) for one in everybody]
        return [one[8 : 8 + int.from_bytes(one[:8], "little")] for one in raw]

    def set_timeout(self, timeout: timedelta) -> None:
        self._group._set_default_timeout(timeout)

    @property
    def is_cut(self) -> bool:
        """Not known here: nothing interrupts a rank that waits in gloo."""
        return False

    def spoil(self) -> None:
        """Nothing to do: nothing interrupts a rank that waits in gloo."""

    def cut(self) -> None:
        """Nothing to do: its connections are gloo's."""
