"""The attempts of a job: torchrun restarts all workers after a failure, and when an agent joins or leaves.

torchrun does not report which attempt a process belongs to, so this is derived from the known ranks.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from ddp_notebook.observe.observer import Observer
from ddp_notebook.records.words import group_by_value, list_ranks
from ddp_notebook.registry.torchrun import RankEntry
from ddp_notebook.torchrun.member import Member


@dataclass(slots=True, kw_only=True, eq=False)
class Round:
    """One attempt."""

    number: int  # counted by this notebook, from 1; the number of the cell in the recording
    world_size: int
    observer: Observer  # receives its recording
    members: dict[int, Member] = field(default_factory=dict)  # rank -> connected process
    began_s: float = field(default_factory=time.monotonic)

    @property
    def there(self) -> list[int]:
        """Ranks with a living process that sends messages."""
        return [rank for rank in self.living if self.members[rank].has_joined]

    @property
    def living(self) -> list[int]:
        """Ranks with a living process."""
        return [rank for rank, one in sorted(self.members.items()) if one.is_there]

    @property
    def is_under_way(self) -> bool:
        return bool(self.living)

    def takes(self, place: RankEntry) -> bool:
        """Return whether a new process belongs to this attempt."""
        return place.world_size == self.world_size and place.rank not in self.members

    @property
    def how_it_ended(self) -> str:
        """The end of the attempt in words; "" while it runs.

        Ranks whose own code failed come first, because operations of other ranks fail as a result.
        """
        if self.is_under_way or not self.members:
            return ""
        words = group_by_value({rank: one.how_it_went for rank, one in self.members.items()})
        ordered = sorted(words.items(), key=lambda item: min(self.members[rank].cause_order for rank in item[1]))
        return "; ".join(f"{list_ranks(ranks)}: {how}" for how, ranks in ordered)


class Events:
    """The last events of a job, in sentences."""

    def __init__(self) -> None:
        self._lines: list[tuple[float, str]] = []
        self._lock = threading.Lock()

    def add(self, line: str) -> None:
        """Add a sentence. From any thread."""
        with self._lock:
            self._lines = [*self._lines[-99:], (time.time(), line)]

    def last(self, count: int) -> list[str]:
        """Return the last sentences with their times."""
        with self._lock:
            return [f"{time.strftime('%H:%M:%S', time.localtime(at))} {line}" for at, line in self._lines[-count:]]
