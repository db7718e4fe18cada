"""Fold lines of several ranks: a line that several ranks write is shown once, with the set of these ranks.

The lines of one rank keep their order. Lines of different ranks are aligned by their text. The output

    rank 0   epoch 1   loss 0.51   done
    rank 1   epoch 1   loss 0.48   done

becomes "epoch 1" of both, "loss 0.51 | 0.48", and "done" of both. A line waits a moment for the other ranks. A late
rank can still join the tail, which are the lines shown last.

This module has no clock, no threads and no output.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

from ddp_notebook.messages.ranks import Display
from ddp_notebook.run.output.numbers import LinePattern, form_of, merged

TWINS_S = 0.05  # time that a line without numbers waits for equal lines of other ranks
OTHERS_S = 0.5  # time that a line with numbers, a display or a value waits for those of other ranks
LATE_S = 2.0  # time for which lines that were shown without all ranks are remembered
_TOGETHER_S = 0.02  # lines that are due within this time are shown together with lines that are due now
_LOOK_S = 0.01
_MOST_ALONE = 1000  # kinds of lines known to come from some ranks only
_DISPLAYS, _VALUES = "displays", "values"


@dataclass(slots=True)
class Item:
    """A line of text, or a display, whose only text is its label. Items with equal keys are duplicates.

    Properties that follow from the text are computed on demand: lines that are equal on all ranks never need them.

    Attributes:
        family: equal for items that may be shown together.
        marker: equal for items of several ranks that belong together: the text of a line without measured values.
        form: pattern of a line that may be merged with lines that differ in numbers.
    """

    key: str
    stream: str = "stdout"
    text: str = ""
    display: Display | None = None
    waits_s: float = TWINS_S
    family: str = field(default="", init=False, compare=False, repr=False)
    marker: str = field(default="", init=False, compare=False, repr=False)
    form: LinePattern | None = field(default=None, init=False, compare=False, repr=False)

    @classmethod
    def line(cls, stream: str, text: str) -> Item:
        """Create an item for a line, given without its line end."""
        return cls(f"{stream}:{text}", stream, text)

    @classmethod
    def value(cls, text: str) -> Item:
        """Create an item for the text of a cell's value. It never equals a printed line."""
        return cls(f"value:{text}", "stdout", text, waits_s=OTHERS_S)

    @classmethod
    def displayed(cls, rank: int, display: Display) -> Item:
        """Create an item for a display. A display with a handle belongs to its rank, which alone can update it."""
        handle = (display.content.get("transient") or {}).get("display_id")
        owner = "" if handle is None else f"{rank}:{handle}:"
        data = display.content.get("data") or {}
        content = json.dumps(data, sort_keys=True, default=str)
        is_new = display.msg_type in ("display_data", "execute_result")  # an update does not wait
        key = f"display:{display.msg_type}:{owner}{content}"
        return cls(key, display=display, waits_s=OTHERS_S if is_new else TWINS_S)

    def parse(self) -> Item:
        """Compute family, marker and form once, and return this item."""
        if self.family:
            return self
        self.family = self.marker = self.key
        if self.display is None:
            self.form = form = form_of(self.text)
            if form is not None:
                kind = self.key.partition(":")[0]
                self.family, self.marker = f"{kind}:{form.shape}", f"{kind}:{form.marker}"
        if self.waits_s == OTHERS_S:
            self.family = _VALUES if self.display is None else _DISPLAYS
        return self

    @property
    def is_display(self) -> bool:
        """Return whether it is a new display, not an update or a clear."""
        return self.display is not None and self.display.msg_type in ("display_data", "execute_result")


@dataclass(slots=True)
class Folded:
    """An item, and the ranks that have written it."""

    item: Item
    ranks: list[int]


@dataclass(slots=True)
class Tail:
    """The lines shown last, as long as late ranks may join them."""

    entries: list[Folded] = field(default_factory=list)
    changed: bool = False  # changed since it was shown
    joined: bool = False  # a rank has joined
    _next: dict[int, int] = field(default_factory=dict)  # the first entry that may be the next line, by rank
    in_time: set[int] = field(default_factory=set)  # ranks that are not late: their next line comes after these

    def extend(self, entries: list[Folded]) -> None:
        """Add entries that were shown directly after it."""
        for entry in entries:
            self.entries.append(entry)
            self.in_time.update(entry.ranks)
            self._next.update(dict.fromkeys(entry.ranks, len(self.entries)))

    def join(self, rank: int, item: Item) -> bool:
        """Let a rank join an entry that equals its line. Return whether there is such an entry."""
        for number in range(self._next.get(rank, 0), len(self.entries)):
            entry = self.entries[number]
            if entry.item.key == item.key:
                entry.ranks = sorted([*entry.ranks, rank])
                self._next[rank] = number + 1
                self.changed = self.joined = True
                return True
        return False

    def insert(self, late: Folded) -> bool:
        """Insert a line of late ranks next to the same line of other ranks, or else in the order of ranks.

        Return False if these ranks are not late: then their line comes after the shown lines.
        """
        if not self.in_time.isdisjoint(late.ranks):
            return False
        at = self._place(late, max(self._next.get(rank, 0) for rank in late.ranks))
        self.entries.insert(at, late)
        self._next = {rank: number + (number > at) for rank, number in self._next.items()}
        self._next.update(dict.fromkeys(late.ranks, at + 1))
        self.changed = self.joined = True
        return True

    def _place(self, late: Folded, start: int) -> int:
        """Return the number of the entry, `start` or a later one, before which a late line is inserted."""
        family = late.item.parse().family
        if start > 0 and self.entries[start - 1].item.parse().family == family:
            while start < len(self.entries) and self._goes_on(start, family):
                start += 1  # lines of other ranks next to the last line of this rank
        numbers = range(start, len(self.entries))
        same = next((number for number in numbers if self.entries[number].item.parse().family == family), None)
        at = start if same is None else same
        while at < len(self.entries) and self.entries[at].ranks[0] < late.ranks[0]:
            if same is not None and at > same and not self._goes_on(at, family):
                break
            at += 1
        return at

    def _goes_on(self, number: int, family: str) -> bool:
        """Return whether an entry is the same line as the one before it, of a higher rank."""
        entry = self.entries[number]
        return entry.item.parse().family == family and entry.ranks[0] > self.entries[number - 1].ranks[0]


class _Queue:
    """Waiting items of one rank. Their markers are counted on demand."""

    def __init__(self) -> None:
        self._counted: deque[tuple[float, Item]] = deque()
        self._fresh: deque[tuple[float, Item]] = deque()
        self._counts: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self._counted or self._fresh)

    def add(self, came_s: float, item: Item) -> None:
        self._fresh.append((came_s, item))

    @property
    def head(self) -> tuple[float, Item]:
        return self._counted[0] if self._counted else self._fresh[0]

    def has(self, marker: str) -> bool:
        """Return whether an item with this marker waits."""
        while self._fresh:
            one = self._fresh.popleft()
            self._counted.append(one)
            counted = one[1].parse().marker
            self._counts[counted] = self._counts.get(counted, 0) + 1
        return marker in self._counts

    def pop(self) -> Item:
        """Remove the first item, and return it."""
        if not self._counted:
            item = self._fresh.popleft()[1]
        else:
            item = self._counted.popleft()[1]
            if self._counts[item.marker] == 1:
                del self._counts[item.marker]
            else:
                self._counts[item.marker] -= 1
        return item


class Fold:
    """Collects items by rank, and returns them folded.

    Args:
        folds: merge items of several ranks. False: show each line of each rank separately, without waiting.

    Example:
        >>> fold = Fold()
        >>> for rank in range(3):
        ...     fold.add(rank, Item.line("stdout", f"loss {rank / 10}"), now=0.0)
        >>> [(entry.ranks, entry.item.text) for entry in fold.take(now=0.0, talking={0, 1, 2})]
        [([0, 1, 2], 'loss 0.0 | 0.1 | 0.2')]
    """

    def __init__(self, folds: bool = True) -> None:
        self._folds = folds
        self._queues: dict[int, _Queue] = {}
        self._alone: dict[str, set[int]] = {}  # the only ranks that have shown such items, by family
        self._passed: dict[str, tuple[float, dict[int, int]]] = {}  # last time and count by rank, for each marker

    def __bool__(self) -> bool:
        return any(self._queues.values())

    def add(self, rank: int, item: Item, now: float) -> None:
        """Add an item of a rank, which arrived at `now` (seconds)."""
        if not self._folds and (item.display is None or item.is_display):
            is_value = item.waits_s == OTHERS_S
            item.key = f"{rank}:{item.key}"
            item.family, item.marker = _DISPLAYS if is_value else item.key, item.key
            item.waits_s = OTHERS_S if is_value else 0.0
        if rank not in self._queues:
            self._queues[rank] = _Queue()
        self._queues[rank].add(now, item)

    def take(
        self, now: float, talking: Collection[int], join: Callable[[int, Item], bool] = lambda *_: False
    ) -> list[Folded]:
        """Return the items that need not wait any longer, in display order.

        Args:
            now: seconds; items that have waited long enough are returned.
            talking: ranks that may still write.
            join: adds an item of a rank to the lines shown last, and returns whether that was possible. It is called
                until something new is to be shown.
        """
        taken: list[Folded] = []
        if not self._queues:  # no rank has written anything yet
            return taken
        due_s = now  # latest due time of items to return
        if any(queue and now >= self._due_s(queue) for queue in self._queues.values()):
            due_s += _TOGETHER_S
        while True:
            if not taken:
                self._join(join)
            found = list(self._ready(now, due_s, talking))
            if not found:
                return taken
            for ranks, has_waited in found:
                taken += self._fold(ranks, has_waited, now, talking)

    def take_all(self) -> list[Folded]:
        """Return all items, because no more can arrive."""
        return self.take(float("inf"), ())

    def wait_s(self, now: float) -> float | None:
        """Return the seconds until `take` must be called again; None: no items wait."""
        waits = [self._due_s(queue) - now for queue in self._queues.values() if queue]
        # An item that is due and was not returned waits for a duplicate, which is behind an item that is not due.
        return min((wait_s for wait_s in waits if wait_s > 0), default=_LOOK_S if waits else None)

    # ---- which items are ready

    def _join(self, join: Callable[[int, Item], bool]) -> None:
        for rank, queue in self._queues.items():
            while queue and join(rank, queue.head[1]):
                queue.pop()

    def _ready(self, now: float, due_s: float, talking: Collection[int]) -> Iterator[tuple[list[int], bool]]:
        """Yield the ranks whose first items are shown together, and whether they waited for other ranks in vain."""
        heads = {rank: queue.head[1] for rank, queue in sorted(self._queues.items()) if queue}
        if not heads:
            return
        is_all = len(heads) == len({*talking, *heads})
        if is_all and len({item.key for item in heads.values()}) == 1:
            yield list(heads), False
            return
        families = self._families(heads)
        if is_all and len(families) == 1 and not self._passed and len({item.marker for item in heads.values()}) == 1:
            yield list(heads), False
            return
        yield from self._ready_of_families(families.values(), heads, now, due_s, talking)

    def _ready_of_families(
        self,
        families: Collection[list[int]],
        heads: dict[int, Item],
        now: float,
        due_s: float,
        talking: Collection[int],
    ) -> Iterator[tuple[list[int], bool]]:
        """Do the work of `_ready` if the first items of the ranks differ. `heads`: the first item of each rank."""
        most = len({*talking, *heads})  # number of ranks that may have such an item
        is_all = len(heads) == most
        crossed: list[tuple[float, list[int]]] = []
        groups = 0
        found = False
        for ranks in families:
            family_due_s = min(self._due_s(self._queues[rank]) for rank in ranks)
            is_due = family_due_s <= due_s
            if self._passed and (late := self._late(ranks, heads, now)):
                found = True
                yield late, False
                ranks = [rank for rank in ranks if rank not in late]
            free: list[int] = []
            for marker, its_ranks in _by_marker(ranks, heads).items():
                groups += 1
                if not self._comes_elsewhere(marker, its_ranks, heads):
                    free += its_ranks
                elif is_due or is_all:
                    crossed.append((family_due_s, its_ranks))
            if free and (is_due or len(free) == most or self._is_complete(free, heads, talking)):
                found = True
                yield sorted(free), is_due
        if crossed and not found and len(crossed) == groups:  # each waits for another
            yield min(crossed, key=lambda one: one[0])[1], False

    def _comes_elsewhere(self, marker: str, ranks: Collection[int], heads: Collection[int]) -> bool:
        """Return whether the queue of another rank has such an item, after its first one."""
        others = () if len(ranks) == len(heads) else [rank for rank in heads if rank not in ranks]
        return any(self._queues[rank].has(marker) for rank in others)

    def _families(self, heads: dict[int, Item]) -> dict[str, list[int]]:
        """Return the ranks whose first items may be shown together, by the name of their family."""
        families: dict[str, list[int]] = {}
        for rank, item in heads.items():
            families.setdefault(item.parse().family, []).append(rank)
        if self._alone:
            for name, ranks in families.items():
                if name in self._alone and not self._alone[name].issuperset(ranks):
                    del self._alone[name]
        return families

    def _due_s(self, queue: _Queue) -> float:
        """Return the time at which the first item of a queue stops waiting."""
        came_s, item = queue.head
        if item.waits_s == 0.0:
            return came_s
        item.parse()
        if item.waits_s == OTHERS_S and item.display is None:  # a value, usually the last output of its rank
            return came_s + OTHERS_S
        may_wait = item.waits_s == OTHERS_S or item.form is not None
        return came_s + (OTHERS_S if may_wait and item.family not in self._alone else TWINS_S)

    def _is_complete(self, ranks: list[int], heads: dict[int, Item], talking: Collection[int]) -> bool:
        """Return whether no other rank can have such items next.

        This is so if each other rank has a different first item, which one of these ranks has later in its queue.
        """
        others = set(talking).difference(ranks)
        return bool(others) and all(
            other in heads and any(self._queues[rank].has(heads[other].marker) for rank in ranks) for other in others
        )

    def _late(self, ranks: list[int], heads: dict[int, Item], now: float) -> list[int]:
        """Return the ranks whose lines with numbers arrived after those of the other ranks were shown."""
        late: list[int] = []
        for marker, its_ranks in _by_marker(ranks, heads).items():
            if (passed := self._passed.get(marker)) is not None and now - passed[0] <= LATE_S:
                most = max(passed[1].values())
                late += [rank for rank in its_ranks if passed[1].get(rank, 0) < most]
        return sorted(late)

    # ---- how they are folded

    def _fold(self, ranks: list[int], has_waited: bool, now: float, talking: Collection[int]) -> list[Folded]:
        """Remove the first items of ranks, and fold them."""
        items = {rank: self._queues[rank].pop() for rank in ranks}
        first = items[ranks[0]]
        is_for_all = len(ranks) >= len(talking) and set(ranks).issuperset(talking)
        if has_waited and not is_for_all and (first.is_display or first.form is not None):
            self._remember_alone(first.family, ranks)
        if self._passed or not is_for_all:
            self._remember_passed(items, now, is_for_all)
        if len(ranks) == 1 or len({item.key for item in items.values()}) == 1:
            return [Folded(first, ranks)]
        by_shape: dict[str, list[int]] = {}
        for rank, item in items.items():
            by_shape.setdefault(item.key if item.form is None else item.form.shape, []).append(rank)
        entries: list[Folded] = []
        for its_ranks in by_shape.values():
            entries += _merged(its_ranks, items)
        return sorted(entries, key=lambda entry: entry.ranks[0])

    def _remember_alone(self, name: str, ranks: Iterable[int]) -> None:
        if len(self._alone) > _MOST_ALONE:
            self._alone.clear()
        self._alone.setdefault(name, set()).update(ranks)

    def _remember_passed(self, items: dict[int, Item], now: float, is_for_all: bool) -> None:
        """Count lines with numbers that are shown without all ranks. A rank whose line arrives later is late."""
        if now == float("inf"):
            return
        while self._passed and now - next(iter(self._passed.values()))[0] > LATE_S:
            del self._passed[next(iter(self._passed))]
        for rank, item in items.items():
            if item.waits_s != TWINS_S:
                continue
            if item.parse().form is not None and (not is_for_all or item.marker in self._passed):
                counts = self._passed.pop(item.marker, (now, {}))[1]
                counts[rank] = counts.get(rank, 0) + 1
                self._passed[item.marker] = now, counts  # inserted last, because the dict is ordered by time


def _by_marker(ranks: Iterable[int], heads: dict[int, Item]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for rank in ranks:
        groups.setdefault(heads[rank].marker, []).append(rank)
    return groups


def _merged(ranks: list[int], items: dict[int, Item]) -> list[Folded]:
    """Merge items of one shape, or return each separately."""
    first = items[ranks[0]]
    forms = [form for rank in ranks if (form := items[rank].form) is not None]
    is_different = len(forms) == len(ranks) and any(items[rank].key != first.key for rank in ranks)
    if is_different and (text := merged(ranks, forms)) is not None:
        item = Item("", first.stream, text)  # no line of one rank has this key
        item.family = item.marker = first.family
        return [Folded(item, ranks)]
    groups: dict[str, list[int]] = {}
    for rank in ranks:
        groups.setdefault(items[rank].key, []).append(rank)
    return [Folded(items[its_ranks[0]], its_ranks) for its_ranks in groups.values()]
