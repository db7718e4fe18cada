"""The tracks of a Chrome trace: slices, arrows between them, counters, and the JSON of all that.

Slices of one track lie beside or within each other, since viewers garble slices that overlap in part. A slice that
overlaps another goes to a further track of the same name. Times are nanoseconds of one clock until they are written.

Source: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (Trace Event Format).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Event = dict[str, Any]

_TRACKS = 10_000  # of a process: numbers of tracks are unique in the whole trace, and none is that of a process
_ORDER = {"M": 0, "X": 1, "C": 2, "i": 3, "s": 4, "t": 5, "f": 6}  # an arrow comes behind the slice that it leaves


@dataclass(slots=True, eq=False)
class Slice:
    """Something that lasts."""

    name: str
    category: str
    start_ns: int
    end_ns: int
    args: dict[str, Any] = field(default_factory=dict)
    track: tuple[int, str] = (-1, "")  # set when it is put there: the process, and the name of the track
    lane: int = 0  # which of the tracks of that name


class Point(NamedTuple):
    """Where an arrow touches a slice."""

    slice: Slice
    ts_ns: int  # within it


class Trace:
    """What is drawn, by process and track. Tracks of a process are shown in the order in which they are named first.

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
        self._counts: dict[int, int] = {}  # of those of a process
        self._events: list[Event] = []
        self._slices: list[Slice] = []
        self._arrows: list[tuple[str, str, list[Point]]] = []

    @property
    def begin_ns(self) -> int:
        """The time that is 0 in the file."""
        times = [one.start_ns for one in self._slices] + [event["ts"] for event in self._events]
        return min(times, default=0)

    def add_process(self, pid: int, name: str, label: str = "") -> None:
        """A process; they are shown by number."""
        self._processes[pid] = name, label

    def add_slices(self, pid: int, track: str, slices: Iterable[Slice], *, nests: bool = True) -> None:
        """Slices on a track, and on further ones of that name where they overlap.

        Args:
            pid: of the process.
            track: its name.
            slices: in any order; all that this track will have.
            nests: whether one that lies within another one is part of it.
        """
        ordered = sorted(slices, key=lambda one: (one.start_ns, -one.end_ns))
        for one, lane in zip(ordered, lanes([(one.start_ns, one.end_ns) for one in ordered], nests), strict=True):
            one.track, one.lane = (pid, track), lane
            self._slices.append(one)
            self._number(one.track, lane)

    def add_arrow(self, name: str, category: str, points: Iterable[Point]) -> None:
        """An arrow from slice to slice, which are on tracks already. Times do not descend along it."""
        self._arrows.append((name, category, list(points)))

    def add_counter(self, pid: int, name: str, ts_ns: int, values: Mapping[str, float]) -> None:
        """Numbers at a time, drawn as a curve each."""
        self._events.append({"ph": "C", "name": name, "pid": pid, "ts": ts_ns, "args": dict(values)})

    def add_instant(self, pid: int, track: str, name: str, ts_ns: int, args: Mapping[str, Any] | None = None) -> None:
        """A mark on a track."""
        event = {"ph": "i", "s": "t", "name": name, "pid": pid, "tid": self._number((pid, track), 0), "ts": ts_ns}
        self._events.append(event | ({"args": dict(args)} if args else {}))

    def events(self) -> list[Event]:
        """All of it in the order of time, in microseconds since the first event."""
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
                yield event | {"bp": "e"} if phase == "f" else event  # to the slice around it, not to the next one


def lanes(times: Sequence[tuple[int, int]], nests: bool) -> list[int]:
    """The lane of each interval, such that none overlaps another one in part.

    Args:
        times: begin and end, by begin, the longer one first.
        nests: whether one may lie within another one.

    Example:
        >>> lanes([(0, 10), (2, 5), (4, 7), (7, 12)], nests=True)
        [0, 0, 1, 1]
        >>> lanes([(0, 10), (2, 5), (5, 7)], nests=False)
        [0, 1, 1]
    """
    open_ends: list[list[int]] = []  # of each lane, the inner one last
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
