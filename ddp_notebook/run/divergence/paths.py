"""Paths of ranks through a cell: the lines of their collectives, in order, from the recording."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from ddp_notebook.observe.tables.matching import RowSource, calls_of
from ddp_notebook.observe.tables.ring_buffer import select
from ddp_notebook.records.operation import POINT_TO_POINT, Operation
from ddp_notebook.records.words import called_of

_IN_CELL = re.compile(r"(?:cell|(?P<source>In\[\d+\])) line (?P<line>\d+)(?: in (?P<function>[\w.<>]+))?")
_IN_FILE = re.compile(r"(?P<source>[^/:]+):(?P<line>\d+) in (?P<function>[\w.<>]+)")


@dataclass(frozen=True, slots=True)
class Event:
    """One collective of a rank, or the end of its cell.

    Attributes:
        source: "" for the cell, "In[3]" for an earlier one, or the name of a file.
        line: line in that text; 0 for the end of the cell.
        op, api, bucket: as in `schema.CALL`. `api` is "" if it is unknown.
    """

    source: str = ""
    line: int = 0
    function: str = ""
    op: str = ""
    api: str = ""
    bucket: int = -1

    @property
    def place(self) -> str:
        """Return the line for a sentence: "line 7", "In[3] line 7" or "util.py:7"."""
        if self.source.endswith(".py"):
            return f"{self.source}:{self.line}"
        return f"{self.source} line {self.line}".strip()


END = Event()


@dataclass(frozen=True, slots=True)
class LastAct:
    """Last act of a rank: it waits in an operation, it has failed at a line, or it has ended the cell."""

    operation: Operation | None = None
    place: str = ""  # as in `RankView`
    has_failed: bool = False


@dataclass(frozen=True, slots=True)
class Paths:
    """Collectives of ranks in the groups in which they wait.

    Attributes:
        events: by rank.
        has_start: False if earlier collectives of the cell were not kept.
    """

    events: Mapping[int, list[Event]]
    has_start: bool = True


def paths_of(recording: RowSource, cell: int, last: Mapping[int, LastAct]) -> Paths | None:
    """Return the paths of ranks that wait for each other.

    Args:
        recording: has the finished calls.
        cell: number of the cell.
        last: the last act of each rank of the cell.

    Returns:
        None if they cannot be compared: all ranks wait for messages, a line is unknown, or several threads use a group.
    """
    waits = {rank: act.operation for rank, act in last.items() if act.operation is not None}
    groups = {one.key for one in waits.values() if not one.is_point_to_point}
    if not groups:
        return None
    members = set.intersection(*(set(one.ranks) for one in waits.values())) & last.keys()
    calls = calls_of(recording, cell)
    found: dict[int, list[tuple[tuple[str, int], Event]]] = {rank: [] for rank in sorted(members)}
    calls = select(calls, np.argsort(calls["call"], kind="stable"))
    names = {group: recording.group_of(group)["name"] for group in np.unique(calls["group"]).tolist()}
    known: dict[tuple[int, ...], Event | None] = {}  # a cell may have made half a million calls at a few lines
    columns = (calls[name].tolist() for name in ("rank", "group", "number", "thread", "op", "api", "site", "bucket"))
    for rank, group, number, thread, *what in zip(*columns, strict=True):
        if rank not in found or names[group] not in groups:
            continue
        if (key := tuple(what)) not in known:
            known[key] = _event_of(recording, *what)
        event = known[key]
        if event is not None and event.op in POINT_TO_POINT:
            continue
        if thread or event is None:
            return None
        found[rank].append(((names[group], number), event))
    for rank, events in found.items():
        key, event = _last_event(last[rank])
        if event is None:
            return None
        if not events or key != events[-1][0]:
            events.append((key, event))
    return _aligned(found)


def _event_of(recording: RowSource, op: int, api: int, site: int, bucket: int) -> Event | None:
    """Return the event of a call; None if its line is unknown. The arguments are columns of `schema.CALL`."""
    name = recording.text(op)
    event = Event() if name in POINT_TO_POINT else _event(recording.text(site))  # the line of a message is not needed
    return event and replace(event, op=name, api=recording.text(api), bucket=bucket)


def _last_event(act: LastAct) -> tuple[tuple[str, int], Event | None]:
    """Return the key of the last act in its group, and its event; None if its line is unknown."""
    operation, event = act.operation, _event(act.place)
    if operation is None and not act.has_failed:
        return _NO_NUMBER, END
    api = called_of(act.place)
    if operation is None:  # its call was refused before it began
        return _NO_NUMBER, event and replace(event, op=api)
    is_message = operation.is_point_to_point
    key = _NO_NUMBER if is_message else (operation.key, operation.number)
    return key, event and replace(event, op=operation.name, api=api)


_NO_NUMBER = ("", 0)  # key of the end, a message, or a refused call


def _aligned(found: Mapping[int, list[tuple[tuple[str, int], Event]]]) -> Paths | None:
    """Return the paths from the first collective that is known of all ranks.

    Args:
        found: (group, number in the group) and event of each collective, by rank.
    """
    if len(found) < 2:
        return None
    keys = [[key for key, _ in events if key != _NO_NUMBER] for events in found.values()]
    if len({own[0] for own in keys if own}) <= 1:
        return Paths({rank: [event for _, event in events] for rank, events in found.items()})
    common = set.intersection(*map(set, keys))
    if not common or len({group for group, _ in common}) > 1:
        return None
    first = min(common)
    cut = {
        rank: [event for key, event in events if key >= first or key == _NO_NUMBER] for rank, events in found.items()
    }
    return Paths(cut, has_start=False)


def _event(site: str) -> Event | None:
    found = _IN_CELL.match(site) or _IN_FILE.match(site)
    if found is None:
        return None
    return Event(found["source"] or "", int(found["line"]), found["function"] or "")
