"""Names of groups that only their members make: `new_group(ranks, use_local_synchronization=True)`.

The members meet at the store under a name that each of them works out. torch hashes their ranks with the number of all
groups that the rank is in, which differs between members as soon as one of them is in another group too: then they
wait for each other under two names until the timeout. In a session that is soon so, since it outlives many programs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch.distributed import distributed_c10d

if TYPE_CHECKING:
    from ddp_notebook.rank.group.connections.cutting import Connections


class GroupNames:
    """Names such groups after their ranks, and how many of these ranks there were before: on both members agree."""

    def __init__(self) -> None:
        self._epoch = 0
        self._given: set[str] = set()  # of this epoch: destroyed groups have left their addresses in the store

    def begin(self, epoch: int) -> None:
        """The groups have formed anew, and all ranks start counting again: one that has joined knows of no earlier one.

        Args:
            epoch: the same on all ranks.
        """
        self._epoch = epoch
        self._given.clear()

    def watch(self, connections: Connections) -> None:
        """Name groups from now on. A torch that names them elsewhere keeps its own names."""
        if hasattr(distributed_c10d, "_hash_ranks_to_str"):
            distributed_c10d._hash_ranks_to_str = self.name
            connections.on_group = lambda group: self._given.add(group.group_name)

    def name(self, ranks: Sequence[int]) -> str:
        """The name of the next group of these ranks. One that could not be made leaves its name to the next one.

        Example:
            >>> names = Names()
            >>> names.name([0, 1]) == names.name([0, 1]) != names.name([0, 2])
            True
        """
        at = 0
        while (found := self._hash(ranks, at)) in self._given:
            at += 1
        return found

    def _hash(self, ranks: Sequence[int], at: int) -> str:
        words = f"{'_'.join(map(str, ranks))} {self._epoch} {at}"
        return hashlib.sha1(words.encode(), usedforsecurity=False).hexdigest()
