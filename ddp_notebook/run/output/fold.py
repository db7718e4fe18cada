"""Lines of many ranks, folded: a line that several ranks write appears once, with the set of those ranks.

Each rank's lines keep their order. Between ranks they are aligned as a person would align them. From

    rank 0   epoch 1   loss 0.51   done
    rank 1   epoch 1   loss 0.48   done

follow "epoch 1" of both, the two losses, and "done" of both. A line waits a moment for its twins; a later twin can
still join the tail, which is what was shown last.

Pure bookkeeping: no clock, no thread, no output.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from ddp_notebook.wire.events import Display

TWINS_S = 0.05  # how long a line waits for its twins
VALUES_S = 0.5  # and a cell's value, mostly its rank's last word: so they stand in the order of the ranks
_TOGETHER_S = 0.02  # so much less if others are shown anyway: the next ones would have to wait for the outlet
_LOOK_S = 0.01


@dataclass(frozen=True, slots=True)
class Item:
    """A line of text, or a display, whose only text is its label. Items with equal keys are twins."""

    key: str
    stream: str = "stdout"
    text: str = ""
    display: Display | None = None
    waits_s: float = TWINS_S

    @classmethod
    def line(cls, stream: str, text: str, waits_s: float = TWINS_S) -> Item:
        """A line, without its end."""
        return cls(f"{stream}:{text}", stream, text, waits_s=waits_s)

    @classmethod
    def displayed(cls, rank: int, display: Display) -> Item:
        """A display. One with a handle belongs to its rank, which alone can update it."""
        handle = (display.content.get("transient") or {}).get("display_id")
        owner = "" if handle is None else f"{rank}:{handle}:"
        data = display.content.get("data") or {}
        content = json.dumps(data, sort_keys=True, default=str)
        return cls(f"display:{display.msg_type}:{owner}{content}", display=display, waits_s=waits_s(display))


@dataclass(slots=True)
class Folded:
    """An item, and the ranks that have it."""

    item: Item
    ranks: list[int]


@dataclass(slots=True)
class Tail:
    """The entries shown last, as long as late twins may join them."""

    entries: list[Folded] = field(default_factory=list)
    changed: bool = False  # since it was shown
    joined: bool = False  # some rank has joined
    _next: dict[int, int] = field(default_factory=dict)  # by rank: the first entry that may be its next line

    def extend(self, entries: list[Folded]) -> None:
        """Add entries that were shown right after it."""
        for entry in entries:
            self.entries.append(entry)
            self._next.update(dict.fromkeys(entry.ranks, len(self.entries)))

    def join(self, rank: int, item: Item) -> bool:
        """Let a rank join an entry that is its line too. Returns whether there is one."""
        for number in range(self._next.get(rank, 0), len(self.entries)):
            entry = self.entries[number]
            if entry.item.key == item.key:
                entry.ranks = sorted([*entry.ranks, rank])
                self._next[rank] = number + 1
                self.changed = self.joined = True
                return True
        return False


class Fold:
    """Collects items by rank and gives them out folded.

    Example:
        >>> fold = Fold()
        >>> for rank in range(3):
        ...     fold.add(rank, Item.line("stdout", "hi"), now=0.0)
        >>> [(entry.ranks, entry.item.text) for entry in fold.take(now=0.0, talking={0, 1, 2})]
        [([0, 1, 2], 'hi')]
    """

    def __init__(self) -> None:
        self._queues: dict[int, deque[tuple[float, Item]]] = {}
        self._counts: defaultdict[int, Counter[str]] = defaultdict(Counter)

    def __bool__(self) -> bool:
        return any(self._queues.values())

    def add(self, rank: int, item: Item, now: float) -> None:
        """Add an item of a rank, which came at `now` (seconds)."""
        self._queues.setdefault(rank, deque()).append((now, item))
        self._counts[rank][item.key] += 1

    def take(self, now: float, talking: Collection[int], tail: Tail | None = None) -> list[Folded]:
        """The items that need not wait any longer, in the order in which to show them.

        Args:
            now: seconds; items that have waited for `waits_s` wait no more.
            talking: ranks that may still write.
            tail: the entries shown last, which ranks may join until something new is shown.
        """
        taken: list[Folded] = []
        if not self._queues:  # nobody has said anything yet
            return taken
        due_s = now  # what is due then is due
        if any(queue and now >= _due_s(*queue[0]) for queue in self._queues.values()):
            due_s += _TOGETHER_S
        while True:
            if tail is not None and not taken:
                self._join(tail)
            found = list(self._ready(due_s, talking))
            if not found:
                return taken
            for entry in found:
                for rank in entry.ranks:
                    self._pop(rank)
            taken += found

    def take_all(self) -> list[Folded]:
        """All items: nothing more can come."""
        return self.take(float("inf"), ())

    def wait_s(self, now: float) -> float | None:
        """Seconds until `take` has to look again; None: nothing waits."""
        waits = [_due_s(*queue[0]) - now for queue in self._queues.values() if queue]
        # an item that is due and still here waits for a twin that is behind an item that is not due
        return min((wait_s for wait_s in waits if wait_s > 0), default=_LOOK_S if waits else None)

    def _join(self, tail: Tail) -> None:
        for rank, queue in self._queues.items():
            while queue and tail.join(rank, queue[0][1]):
                self._pop(rank)

    def _ready(self, due_s: float, talking: Collection[int]) -> Iterator[Folded]:
        """Those of the ranks' first items that are due: all ranks have them, or their wait is over at `due_s`."""
        heads: dict[str, list[int]] = {}
        for rank in sorted(self._queues):
            if self._queues[rank]:
                heads.setdefault(self._queues[rank][0][1].key, []).append(rank)
        waiting = [rank for ranks in heads.values() for rank in ranks]
        most = len({*talking, *waiting})  # ranks that could have it
        crossed: list[tuple[float, Folded]] = []
        found = False
        dues_s = {key: min(_due_s(*self._queues[rank][0]) for rank in ranks) for key, ranks in heads.items()}
        values = [key for key, ranks in heads.items() if self._queues[ranks[0]][0][1].waits_s == VALUES_S]
        if any(dues_s[key] <= due_s for key in values):  # all of them are: one that waits on would be out of order
            dues_s.update(dict.fromkeys(values, due_s))
        for key, ranks in heads.items():
            if len(ranks) < most and dues_s[key] > due_s:
                continue
            entry = Folded(self._queues[ranks[0]][0][1], ranks)
            if self._comes_later(key, waiting, ranks):
                crossed.append((dues_s[key], entry))
            else:
                found = True
                yield entry
        if crossed and not found and len(crossed) == len(heads):  # each waits for another
            yield min(crossed, key=lambda one: one[0])[1]

    def _comes_later(self, key: str, waiting: Iterable[int], ranks: list[int]) -> bool:
        return any(self._counts[rank][key] for rank in waiting if rank not in ranks)

    def _pop(self, rank: int) -> None:
        _, item = self._queues[rank].popleft()
        counts = self._counts[rank]
        counts[item.key] -= 1
        if not counts[item.key]:
            del counts[item.key]


def waits_s(display: Display) -> float:
    """How long a display waits for its twins: a cell's value longer than others."""
    return VALUES_S if display.msg_type == "execute_result" else TWINS_S


def _due_s(came_s: float, item: Item) -> float:
    return came_s + item.waits_s
