"""Profiles of torch.profiler, on tracks of their rank.

Its Chrome traces contain `ts` in microseconds since `baseTimeNanoseconds`, which is in nanoseconds of the Unix epoch.
If that is missing, as before torch 2.3, `ts` counts from the epoch. A process is the rank or one of its GPUs. A thread
is a thread or a stream. Events with a process that is not a number are marks of the profiler itself.

Source: https://github.com/pytorch/kineto/blob/main/libkineto/src/output_json.cpp; with torch 2.13 a span of known begin
came out 0.14 ms behind the call that began it.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from ddp_notebook.errors import UsageError
from ddp_notebook.observe.trace.tracks import Event, Point, Slice, Trace

Profile = str | os.PathLike[str] | Mapping[str, Any]


class _Key(NamedTuple):
    """A thread or a stream, as named in the profile."""

    pid: int
    tid: str


def add_profile(trace: Trace, rank: int, profile: Profile, offset_ns: int | None = None) -> None:
    """Add slices, arrows, marks and counters of a profile to tracks of its rank.

    Args:
        rank: rank of the profile.
        profile: output of `export_chrome_trace`, or the path of its file.
        offset_ns: the rank's wall clock minus the notebook's monotonic clock; None: the present value on this machine.

    Raises:
        UsageError: it is not such a trace.
    """
    found = read(rank, profile)
    if offset_ns is None:
        offset_ns = time.time_ns() - time.monotonic_ns()
    base_ns = int(found.get("baseTimeNanoseconds", 0)) - offset_ns
    events = [event for event in found["traceEvents"] if isinstance(event.get("pid"), int)]
    names = _names(events)

    slices: dict[_Key, list[Slice]] = {}
    by_start: dict[tuple[_Key, int], Slice] = {}
    ends: dict[tuple[str, str, str], dict[str, tuple[_Key, int]]] = {}
    for event in events:
        phase, key = event.get("ph"), _Key(event["pid"], str(event.get("tid", "")))
        if phase == "M" or "ts" not in event:
            continue
        ts_ns = base_ns + round(float(event["ts"]) * 1000)
        name, args = str(event.get("name", "")), _plain(event.get("args") or {})
        if phase == "X":
            end_ns = ts_ns + max(0, round(float(event.get("dur", 0)) * 1000))
            one = Slice(name, str(event.get("cat", "profiler")), ts_ns, end_ns, args)
            slices.setdefault(key, []).append(one)
            by_start[key, ts_ns] = one
        elif phase in ("s", "f"):
            arrow = (str(event.get("cat", "")), name, str(event.get("id", "")))
            ends.setdefault(arrow, {})[phase] = key, ts_ns
        elif phase in ("i", "I"):
            trace.add_instant(rank, _track(key, names), name, ts_ns, args)
        elif phase == "C":
            numbers = {word: value for word, value in args.items() if isinstance(value, int | float)}
            trace.add_counter(rank, f"profiler: {name}", ts_ns, numbers)
    for key, own in sorted(slices.items(), key=lambda item: _place(item[0])):
        trace.add_slices(rank, _track(key, names), own)
    for (category, name, _), both in ends.items():
        # Both ends of an arrow are begins of slices. The other end of some arrows was not profiled.
        begin, end = (by_start.get(both[phase]) if phase in both else None for phase in ("s", "f"))
        if begin is not None and end is not None and begin.start_ns <= end.start_ns:
            trace.add_arrow(name, category or "profiler", [Point(begin, begin.start_ns), Point(end, end.start_ns)])


def read(rank: int, profile: Profile) -> Mapping[str, Any]:
    """Read a profile.

    Raises:
        UsageError: it cannot be read, or is not a profile.
    """
    found: Any = profile
    if not isinstance(profile, Mapping):
        try:
            with open(profile, "rb") as file:
                data = file.read()
            found = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
        except (OSError, EOFError, ValueError) as error:
            raise UsageError(f"the profile of rank {rank}, {os.fspath(profile)!r}, cannot be read: {error}") from error
    if not isinstance(found, Mapping) or not isinstance(found.get("traceEvents"), list):
        raise UsageError(
            f"the profile of rank {rank} has no traceEvents; pass a file from export_chrome_trace of torch.profiler"
        )
    return found


def _names(events: list[Event]) -> dict[_Key | int, str]:
    """Return the names of threads, and the labels of processes: "CPU", "GPU 0"."""
    found: dict[_Key | int, str] = {}
    for event in events:
        args = event.get("args") or {}
        if event.get("name") == "thread_name":
            found[_Key(event["pid"], str(event.get("tid", "")))] = str(args.get("name", "")).strip()
        elif event.get("name") == "process_labels":
            found[event["pid"]] = str(args.get("labels", ""))
    return found


def _track(key: _Key, names: Mapping[_Key | int, str]) -> str:
    process = names.get(key.pid, "")
    # Streams may have the same numbers as threads or as streams of another GPU.
    place = "" if process in ("", "CPU") else f"{process} "
    return f"profiler: {place}{names.get(key) or f'thread {key.tid}'}"


def _place(key: _Key) -> tuple[int, int, str]:
    """Return a sort key: threads, which have the larger process number, come before streams."""
    return -key.pid, int(key.tid) if key.tid.isdecimal() else 0, key.tid


def _plain(value: Any) -> Any:
    """Convert a value for strict JSON, which has no infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value
