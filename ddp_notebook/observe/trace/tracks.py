"""Tracks of a Chrome trace: slices, arrows between them, counters, and their JSON.

Slices of one track are next to or within each other, because viewers cannot show slices that overlap partly. A slice
that overlaps another one goes to an additional track with the same name. Times are nanoseconds of one clock until they
are written.

Source: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (Trace Event Format).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Event = dict[str, Any]

_TRACKS = 10_000  # tracks of a process: numbers of tracks are unique in the trace, and differ from those of processes
_ORDER = {"M": 0, "X": 1, "C": 2, "i": 3, "s": 4, "t": 5, "f": 6}  # an arrow must follow the slice from which it starts


@dataclass(slots=True, eq=False)
class Slice:
    """An interval with a name."""

    name: str
    category: str
    start_ns: int
    end_ns: int
    args: dict[str, Any] = field(default_factory=dict)
    track: tuple[int, str] = (-1, "")  # process and name of the track, set by `add_slices`
    lane: int = 0  # index among the tracks of that name


class Point(NamedTuple):
    """End of an arrow at a slice."""

    slice: Slice
    ts_ns: int  # within the slice


class Trace:
    """Contents of a trace, by process and track. Tracks of a process are shown in the order of their first use.

    Example:
        >>> trace = Trace()
        >>> trace.add_process(0, "rank 0")
        >>> trace.add_slices(0, "cell", [Slice("cell 1", "cell", 5_000, 9_000)])
        >>> trace.events()[-1]
        {'ph': 'X', 'name': 'cell 1', 'cat': 'cell', 'pid': 0, 'tid': 10001, 'ts': 0.0, 'dur': 4.0}
    """

    def __init__(self) -> None:
        self._processes: dict[int, tuple[str, str]] = {}
        self._tracks: dict[tuple[int, str], dict[int, int]] = {}  # numbers by lane
        self._counts: dict[int, int] = {}  # number of tracks by process
        self._events: list[Event] = []
        self._slices: list[Slice] = []
        self._arrows: list[tuple[str, str, list[Point]]] = []

    @property
    def begin_ns(self) -> int:
        """Time that is 0 in the file."""
        times = [one.start_ns for one in self._slices] + [event["ts"] for event in self._events]
        return min(times, default=0)

    def add_process(self, pid: int, name: str, label: str = "") -> None:
        """Add a process. Processes are shown in the order of their numbers."""
        self._processes[pid] = name, label

    def add_slices(self, pid: int, track: str, slices: Iterable[Slice], *, nests: bool = True) -> None:
        """Add slices to a track, and to more tracks of that name if they overlap.

        Args:
            pid: number of the process.
            track: name of the track.
            slices: all slices of this track, in any order.
            nests: True if a slice within another one is part of it.
        """
        ordered = sorted(slices, key=lambda one: (one.start_ns, -one.end_ns))
        for one, lane in zip(ordered, lanes([(one.start_ns, one.end_ns) for one in ordered], nests), strict=True):
            one.track, one.lane = (pid, track), lane
            self._slices.append(one)
            self._number(one.track, lane)

    def add_arrow(self, name: str, category: str, points: Iterable[Point]) -> None:
        """Add an arrow between slices that were added before. Times must not descend along it."""
        self._arrows.append((name, category, list(points)))

    def add_counter(self, pid: int, name: str, ts_ns: int, values: Mapping[str, float]) -> None:
        """Add numbers at one time. Each is drawn as a curve."""
        self._events.append({"ph": "C", "name": name, "pid": pid, "ts": ts_ns, "args": dict(values)})

    def add_instant(self, pid: int, track: str, name: str, ts_ns: int, args: Mapping[str, Any] | None = None) -> None:
        """Add a mark to a track."""
        event = {"ph": "i", "s": "t", "name": name, "pid": pid, "tid": self._number((pid, track), 0), "ts": ts_ns}
        self._events.append(event | ({"args": dict(args)} if args else {}))

    def events(self) -> list[Event]:
        """Return all events in order of time, in microseconds since the first event."""
        begin_ns = self.begin_ns
        found = sorted(
            [*self._slice_events(), *self._arrow_events(), *self._events],
            key=lambda event: (event["ts"], _ORDER[event["ph"]], -event.get("dur", 0)),
        )
        for at, event in enumerate(found):
            event = found[at] = event | {"ts": (event["ts"] - begin_ns) / 1000}
            if "dur" in event:
                event["dur"] /= 1000
        return [*self._names(), *found]

    def _number(self, track: tuple[int, str], lane: int) -> int:
        numbers = self._tracks.setdefault(track, {})
        if lane not in numbers:
            pid = track[0]
            self._counts[pid] = self._counts.get(pid, 0) + 1
            numbers[lane] = (pid + 1) * _TRACKS + self._counts[pid]
        return numbers[lane]

    def _names(self) -> Iterator[Event]:
        for pid, (name, label) in self._processes.items():
            yield _name(pid, 0, "process_name", {"name": name})
            yield _name(pid, 0, "process_sort_index", {"sort_index": pid})
            if label:
                yield _name(pid, 0, "process_labels", {"labels": label})
        for place, ((pid, track), numbers) in enumerate(self._tracks.items()):
            for lane, tid in numbers.items():
                yield _name(pid, tid, "thread_name", {"name": f"{track} ({lane + 1})" if lane else track})
                yield _name(pid, tid, "thread_sort_index", {"sort_index": place * _TRACKS + lane})

    def _slice_events(self) -> Iterator[Event]:
        for one in self._slices:
            event = {
                "ph": "X",
                "name": one.name,
                "cat": one.category,
                "pid": one.track[0],
                "tid": self._number(one.track, one.lane),
                "ts": one.start_ns,
                "dur": one.end_ns - one.start_ns,
            }
            yield event | {"args": dict(one.args)} if one.args else event

    def _arrow_events(self) -> Iterator[Event]:
        for number, (name, category, points) in enumerate(self._arrows, 1):
            for at, point in enumerate(points):
                phase = "s" if at == 0 else "f" if at == len(points) - 1 else "t"
                event = {
                    "ph": phase,
                    "id": number,
                    "name": name,
                    "cat": category,
                    "pid": point.slice.track[0],
                    "tid": self._number(point.slice.track, point.slice.lane),
                    "ts": point.ts_ns,
                }
                yield event | {"bp": "e"} if phase == "f" else event  # bind to the enclosing slice, not to the next one


def lanes(times: Sequence[tuple[int, int]], nests: bool) -> list[int]:
    """Return a lane for each interval, so that no two in a lane overlap partly.

    Args:
        times: begin and end, ordered by begin, the longer one first.
        nests: True if one may be within another one.

    Example:
        >>> lanes([(0, 10), (2, 5), (4, 7), (7, 12)], nests=True)
        [0, 0, 1, 1]
        >>> lanes([(0, 10), (2, 5), (5, 7)], nests=False)
        [0, 1, 1]
    """
    open_ends: list[list[int]] = []  # open ends by lane, the inner one last
    found = []
    for begin, end in times:
        for ends in open_ends:
            while ends and ends[-1] <= begin:
                ends.pop()
        free = (at for at, ends in enumerate(open_ends) if not ends or (nests and end <= ends[-1]))
        lane = next(free, len(open_ends))
        if lane == len(open_ends):
            open_ends.append([])
        open_ends[lane].append(end)
        found.append(lane)
    return found


def _name(pid: int, tid: int, what: str, args: Mapping[str, Any]) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": dict(args)}
