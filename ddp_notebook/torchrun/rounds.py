"""The attempts of a job: torchrun starts all workers afresh when one has failed, and when an agent joins or leaves.
Which process belongs to which attempt nobody says, so it is told from who is there."""

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

    number: int  # counted by this notebook, from 1; in its recording it is the number of the cell
    world_size: int
    observer: Observer  # takes in what it records
    members: dict[int, Member] = field(default_factory=dict)  # by rank: those that have been let in
    began_s: float = field(default_factory=time.monotonic)

    @property
    def there(self) -> list[int]:
        """Ranks whose processes live and speak."""
        return [rank for rank in self.living if self.members[rank].has_joined]

    @property
    def living(self) -> list[int]:
        """Ranks whose processes live."""
        return [rank for rank, one in sorted(self.members.items()) if one.is_there]

    @property
    def is_under_way(self) -> bool:
        return bool(self.living)

    def takes(self, place: RankEntry) -> bool:
        """Whether a process that has come belongs to it."""
        return place.world_size == self.world_size and place.rank not in self.members

    @property
    def how_it_ended(self) -> str:
        """In words; "": it has not. Ranks whose own code failed come first, since operations of the others fail for
        that."""
        if self.is_under_way or not self.members:
            return ""
        words = group_by_value({rank: one.how_it_went for rank, one in self.members.items()})
        ordered = sorted(words.items(), key=lambda item: min(self.members[rank].cause_order for rank in item[1]))
        return "; ".join(f"{list_ranks(ranks)}: {how}" for how, ranks in ordered)


class Events:
    """What has happened in a job, in sentences, the last ones."""

    def __init__(self) -> None:
        self._lines: list[tuple[float, str]] = []
        self._lock = threading.Lock()

    def add(self, line: str) -> None:
        """From any thread."""
        with self._lock:
            self._lines = [*self._lines[-99:], (time.time(), line)]

    def last(self, count: int) -> list[str]:
        """With their times."""
        with self._lock:
            return [f"{time.strftime('%H:%M:%S', time.localtime(at))} {line}" for at, line in self._lines[-count:]]
