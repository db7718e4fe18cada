"""Checks a Chrome trace strictly, and reports the first error.

Replaces Perfetto's reader: the package `perfetto` on PyPI downloads it on first use.
"""

from __future__ import annotations

import json
import math
from typing import Any

_FIELDS = {
    "M": {"name", "pid", "tid", "args"},
    "X": {"name", "cat", "pid", "tid", "ts", "dur"},
    "C": {"name", "pid", "ts", "args"},
    "i": {"name", "pid", "tid", "ts", "s"},
    "s": {"name", "cat", "id", "pid", "tid", "ts"},
    "t": {"name", "cat", "id", "pid", "tid", "ts"},
    "f": {"name", "cat", "id", "pid", "tid", "ts", "bp"},
}


def parse(data: str | bytes) -> dict[str, Any]:
    """Parse the trace in a file as strict JSON."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not in JSON")

    return json.loads(data, parse_constant=refuse)


def check(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """Check all requirements of the format and of viewers. Return the events."""
    trace = parse(json.dumps(trace))
    events = trace["traceEvents"]
    assert set(trace) <= {"traceEvents", "displayTimeUnit", "otherData"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    for event in events:
        assert event["ph"] in _FIELDS, event
        assert _FIELDS[event["ph"]] <= set(event), event
        assert isinstance(event["pid"], int), event
        assert isinstance(event.get("tid", 0), int), event
        assert isinstance(event["name"], str) and event["name"], event
        assert isinstance(event.get("args", {}), dict), event
        for name in ("ts", "dur"):
            assert math.isfinite(event.get(name, 0)) and event.get(name, 0) >= 0, event
    timed = [event for event in events if event["ph"] != "M"]
    assert [event["ts"] for event in timed] == sorted(event["ts"] for event in timed), "not in the order of time"
    assert not timed or timed[0]["ts"] == 0, "does not begin at 0"
    _check_names(events)
    _check_counters(timed)
    _check_slices_and_arrows(timed)
    return events


def _check_names(events: list[dict[str, Any]]) -> None:
    named = [event for event in events if event["ph"] == "M"]
    processes = [event["pid"] for event in named if event["name"] == "process_name"]
    tracks = [(event["pid"], event["tid"]) for event in named if event["name"] == "thread_name"]
    assert len(set(processes)) == len(processes) and len(set(tracks)) == len(tracks), "named twice"
    labels = [(event["pid"], event["args"]["name"]) for event in named if event["name"] == "thread_name"]
    assert len(set(labels)) == len(labels), "two tracks of a process have the same name"
    for event in events:
        assert event["pid"] in processes, f"a process without a name: {event}"
        if event["ph"] in ("X", "i", "s", "t", "f"):
            assert (event["pid"], event["tid"]) in tracks, f"a track without a name: {event}"
    assert not {pid for pid, _ in tracks} & {tid for _, tid in tracks}, "a track has the number of a process"


def _check_counters(timed: list[dict[str, Any]]) -> None:
    for event in timed:
        if event["ph"] == "C":
            assert event["args"] and all(isinstance(value, int | float) for value in event["args"].values()), event


def _check_slices_and_arrows(timed: list[dict[str, Any]]) -> None:
    """Check slices and arrows like Perfetto: an arrow binds to the inner one of the open slices on its track."""
    stacks: dict[tuple[int, int], list[tuple[int, int]]] = {}
    arrows: dict[tuple[str, str, int], str] = {}
    for event in timed:
        if event["ph"] not in ("X", "s", "t", "f"):
            continue
        stack = stacks.setdefault((event["pid"], event["tid"]), [])
        begin = round(event["ts"] * 1000)
        if event["ph"] == "X":
            while stack and stack[-1][1] <= begin:
                stack.pop()
            end = begin + round(event["dur"] * 1000)
            assert not stack or end <= stack[-1][1], f"overlaps another slice of its track in part: {event}"
            stack.append((begin, end))
            continue
        assert stack and stack[-1][0] <= begin <= stack[-1][1], f"an arrow that touches no slice: {event}"
        key = (event["cat"], event["name"], event["id"])
        assert (event["ph"] == "s") == (key not in arrows), f"an arrow without a begin, or with two: {event}"
        assert arrows.get(key) != "f", f"an arrow goes on behind its end: {event}"
        assert event["ph"] != "f" or event["bp"] == "e", event
        arrows[key] = event["ph"]
    assert set(arrows.values()) <= {"f"}, "an arrow without an end"


def tracks(events: list[dict[str, Any]]) -> dict[tuple[int, int], str]:
    """Return the names of tracks, by process and number, in display order."""
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    places = {(e["pid"], e["tid"]): e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
    return {key: named[key] for key in sorted(named, key=lambda key: (key[0], places[key]))}


def slices(events: list[dict[str, Any]], track: str, pid: int = 0) -> list[dict[str, Any]]:
    """Return the slices on one track."""
    names = tracks(events)
    return [e for e in events if e["ph"] == "X" and e["pid"] == pid and names[e["pid"], e["tid"]] == track]


def arrows(events: list[dict[str, Any]], category: str) -> list[list[dict[str, Any]]]:
    """Return the points of each arrow, in its direction."""
    found: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] in ("s", "t", "f") and event["cat"] == category:
            found.setdefault(event["id"], []).append(event)
    return list(found.values())
