"""A recording as a Chrome trace, for https://ui.perfetto.dev and chrome://tracing.

The trace has a process for each rank, named with its host if there are several, with these tracks:

| track | slices |
|---|---|
| cell | cells; marks where a metric is not a finite number |
| step | steps; the arguments are the breakdown of the time |
| forward, backward, optimizer, input | spans of the step, including pipeline actions and named blocks |
| communication: group | collectives, from their issue (on a GPU: from the start on the device) to their end |
| send and recv | messages |
| remote calls made, executed | calls until the caller has the answer; functions on the callee |
| profiler: ... | profile of torch.profiler, if the rank was profiled |

Arrows connect a collective on all its ranks, in the order of arrival: the others waited for the last one. Other arrows
connect a send with its receive, and a remote call with its execution. Curves show metrics and resources.

All times are on the notebook's clock. The possible error of a rank's times is shown next to its name.
"""

from __future__ import annotations

import gzip
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ddp_notebook.errors import UsageError
from ddp_notebook.observe.remote import RemoteCall
from ddp_notebook.observe.steps.steps import steps
from ddp_notebook.observe.tables.matching import RowSource, in_cell, label_of
from ddp_notebook.observe.tables.rpc_rows import calls as remote_calls
from ddp_notebook.observe.trace import profiles as torch_profiles
from ddp_notebook.observe.trace.communication import add_calls
from ddp_notebook.observe.trace.tracks import Point, Slice, Trace
from ddp_notebook.observe.views import Step
from ddp_notebook.observe.writing import in_a_folder, write_whole
from ddp_notebook.records.schema import SPANS, STEP_UNITS, Rows
from ddp_notebook.records.units import ms
from ddp_notebook.records.words import rank_on

MADE, EXECUTED = "remote calls made", "remote calls executed"


def add_remote(trace: Trace, calls: Sequence[RemoteCall], end_ns: int) -> None:
    """Add remote calls to the tracks of their ranks.

    Args:
        calls: in the order in which they were sent.
        end_ns: drawn end of calls without a known end.
    """
    tracks: dict[tuple[int, str], list[Slice]] = {}
    arrows: list[tuple[str, Slice, Slice]] = []
    for call in calls:
        args = _args(call)
        until_ns = end_ns if call.returned_ns is None else call.returned_ns
        made = Slice(call.function, "rpc", call.sent_ns, max(call.sent_ns, until_ns), args)
        tracks.setdefault((call.src, MADE), []).append(made)
        if call.begun_ns is not None and call.dst >= 0:
            until_ns = end_ns if call.ended_ns is None else call.ended_ns
            run = Slice(call.function, "rpc", call.begun_ns, max(call.begun_ns, until_ns), args)
            tracks.setdefault((call.dst, EXECUTED), []).append(run)
            arrows.append((call.function, made, run))
    for (rank, track), slices in sorted(tracks.items(), key=lambda item: item[0]):
        trace.add_slices(rank, track, slices, nests=False)
    for name, made, run in arrows:
        if run.end_ns >= made.start_ns:  # false if the clocks of two hosts differ by more than the call took
            touched = max(run.start_ns, made.start_ns)
            trace.add_arrow(name, "rpc", [Point(made, made.start_ns), Point(run, touched)])


def _args(call: RemoteCall) -> dict[str, Any]:
    found: dict[str, Any] = {
        "call": call.id,
        "kind": call.kind,
        "from": call.src,
        "to": call.dst,
        "line": call.site,
        "parent": call.parent,
        "bytes": call.nbytes,
        "bytes back": call.nbytes_back,
        "queued_ms": None if call.queued_ns is None else call.queued_ns / 1e6,
        "error": call.error,
        "state": "not returned yet" if call.is_open else None,
        "cell": call.cell,
    }
    return {key: value for key, value in found.items() if value not in (None, "")}


_CELL, _BLOCK, _PIPELINE = map(SPANS.index, ("cell", "block", "pipeline"))
_COUNTERS = {  # name of the curves -> columns of `records.RESOURCE`, divisor
    "memory of the process (MB)": ({"resident": "rss_bytes"}, 1e6),
    "CPU (% of one core)": ({"process": "cpu_percent"}, 1.0),
    "memory of the host (MB)": ({"used": "host_used_bytes"}, 1e6),
    "GPU memory (MB)": (
        {"allocated": "gpu_allocated_bytes", "reserved": "gpu_reserved_bytes", "peak": "gpu_peak_bytes"},
        1e6,
    ),
    "GPU (%)": ({"busy": "gpu_percent"}, 1.0),
}

Profile = torch_profiles.Profile


def chrome_trace(
    recording: RowSource,
    cell: int | None = None,
    profiles: Mapping[int, Profile] | None = None,
    profile_offsets_ns: Mapping[int, int] | None = None,
) -> dict[str, Any]:
    """Return the trace as data for `json.dump`.

    Args:
        recording: the recorded tables.
        cell: number of a cell; None: all cells. Resources are limited to its time; profiles are complete.
        profiles: by rank, output of `torch.profiler.profile.export_chrome_trace`: a path, or its contents.
        profile_offsets_ns: by rank, its wall clock minus the notebook's monotonic clock; by default the value on this
            machine.

    Returns:
        The trace. Times are microseconds since the first event; `otherData` has its time on the notebook's clock.

    Raises:
        UsageError: nothing was recorded, or a profile is invalid.

    Example:
        >>> from tests.observe.synthetic import simulate
        >>> trace = chrome_trace(simulate(world_size=2, steps=1))
        >>> sorted({event["name"] for event in trace["traceEvents"] if event["ph"] == "X"})
        ['all_reduce (bucket 0)', 'backward', 'cell 1', 'forward', 'input', 'optimizer', 'step 0']
    """
    trace = Trace()
    errors = {rank: recording.clock_error_ns(rank) for rank in range(recording.world_size)}
    for rank, error in errors.items():
        trace.add_process(rank, rank_on(rank, recording.hosts), f"clock ±{ms(error)}" if error else "")
    spans = _of_cell(recording.rows("span"), cell)
    calls = _of_cell(recording.rows("call"), cell)
    metrics = _of_cell(recording.rows("metric"), cell)
    remotes = remote_calls(recording, cell)
    if not (len(spans) or len(calls) or len(metrics) or remotes or profiles):
        raise UsageError(
            f"nothing to write: nothing was recorded{in_cell(recording, cell)}; run a cell on the ranks, with "
            "%ddp_record meta or values"
        )
    begin_ns, end_ns = _window(spans, calls, metrics, remotes)
    _add_spans(trace, recording, spans, end_ns)
    found_steps = steps(recording, cell)
    _add_steps(trace, found_steps)
    _add_phases(trace, recording, spans, end_ns)
    add_calls(trace, recording, calls, found_steps, end_ns)
    add_remote(trace, remotes, end_ns)
    _add_metrics(trace, recording, metrics)
    resources = recording.rows("resource")
    if cell is not None:
        resources = resources[(resources["time_ns"] >= begin_ns) & (resources["time_ns"] <= end_ns)]
    _add_resources(trace, resources)
    for rank, profile in sorted((profiles or {}).items()):
        if not 0 <= rank < recording.world_size:
            raise UsageError(f"profiles must have ranks from 0 to {recording.world_size - 1} as keys, got {rank}")
        torch_profiles.add_profile(trace, rank, profile, (profile_offsets_ns or {}).get(rank))
    return {
        "traceEvents": trace.events(),
        "displayTimeUnit": "ms",
        "otherData": {
            "made_by": "ddp_notebook",
            "clock": "the notebook's time.monotonic_ns()",
            "begin_ns": trace.begin_ns,
            "clock_error_us": {str(rank): error / 1000 for rank, error in errors.items()},
        },
    }


def save(
    recording: RowSource,
    path: str | os.PathLike[str],
    cell: int | None = None,
    profiles: Mapping[int, Profile] | None = None,
    profile_offsets_ns: Mapping[int, int] | None = None,
) -> Path:
    """Write the trace to a file. If its name ends in ".gz", it is compressed; Perfetto opens it as well.

    Args:
        path: path of the file. An existing file is replaced when the new one is complete.
        recording, cell, profiles, profile_offsets_ns: see `chrome_trace`.

    Raises:
        UsageError: as for `chrome_trace`, or the folder does not exist.
    """
    target = in_a_folder(path)
    if target.is_dir():
        raise UsageError(f"{str(target)!r} is a folder; pass a file in it, such as {str(target / 'run.json')!r}")
    found = chrome_trace(recording, cell, profiles, profile_offsets_ns)
    data = json.dumps(found, allow_nan=False, separators=(",", ":")).encode()
    if target.suffix == ".gz":
        data = gzip.compress(data, compresslevel=6, mtime=0)
    write_whole(target, lambda file: file.write(data))
    return target


def _of_cell(rows: Rows, cell: int | None) -> Rows:
    return rows if cell is None else rows[rows["cell"] == cell]


def _window(spans: Rows, calls: Rows, metrics: Rows, remotes: Sequence[RemoteCall]) -> tuple[int, int]:
    """Return the first and the last known time. Slices without an end are drawn until the last one."""
    times = np.concatenate([spans["start_ns"], spans["end_ns"], calls["issue_ns"], calls["end_ns"], metrics["time_ns"]])
    called = [time for one in remotes for time in (one.sent_ns, one.returned_ns) if time is not None]
    times = np.concatenate([times, np.array(called, np.int64)])
    times = times[times >= 0]
    return (int(times.min()), int(times.max())) if len(times) else (0, 0)


def _slices(recording: RowSource, spans: Rows, end_ns: int) -> Iterator[Slice]:
    columns = ("kind", "name", "cell", "step", "start_ns", "end_ns", "samples", "thread", "pipeline")
    for kind, name, cell, step, start, end, samples, thread, pipeline in zip(
        *(spans[column].tolist() for column in columns), strict=True
    ):
        what = SPANS[kind] if kind < len(SPANS) else str(kind)
        text = recording.text(name)
        args = {"name": text, "samples": samples if samples >= 0 else None, "thread": thread or None}
        args |= {"cell": cell} if kind == _CELL else {"cell": cell, "step": step}
        args |= {"state": "not ended yet"} if end < 0 else {}
        if kind in (_BLOCK, _PIPELINE):
            title = text
        else:
            title = label_of(recording, cell) if kind == _CELL else f"{what} of {text}" if pipeline else what
        yield Slice(
            name=title,
            category=what,
            start_ns=start,
            end_ns=max(start, end if end >= 0 else end_ns),
            args={key: value for key, value in args.items() if value not in (None, "")},
        )


def _add_spans(trace: Trace, recording: RowSource, spans: Rows, end_ns: int) -> None:
    for rank in np.unique(spans["rank"]).tolist():
        mine = spans[(spans["rank"] == rank) & (spans["kind"] == _CELL)]
        trace.add_slices(rank, "cell", _slices(recording, mine, end_ns))


def _add_phases(trace: Trace, recording: RowSource, spans: Rows, end_ns: int) -> None:
    """Add a track for each thread, because a DataLoader with its own thread overlaps the step."""
    phases = spans[spans["kind"] != _CELL]
    for rank, thread in np.unique(phases[["rank", "thread"]]).tolist():
        mine = phases[(phases["rank"] == rank) & (phases["thread"] == thread)]
        track = "forward, backward, optimizer, input"
        trace.add_slices(rank, f"{track}: thread {thread}" if thread else track, _slices(recording, mine, end_ns))


def _add_steps(trace: Trace, found: Sequence[Step]) -> None:
    of_rank: dict[int, list[Slice]] = {}
    for step in found:
        parts = ("input", "compute", "exposed", "waiting", "optimizer", "rest", "communication", "overlapped")
        args: dict[str, Any] = {f"{part}_ms": getattr(step, f"{part}_ns") / 1e6 for part in parts}
        args |= {"cell": step.cell} | ({} if step.samples is None else {"samples": step.samples})
        of_rank.setdefault(step.rank, []).append(Slice(f"step {step.step}", "step", step.start_ns, step.end_ns, args))
    for rank, slices in of_rank.items():
        trace.add_slices(rank, "step", slices)


def _add_metrics(trace: Trace, recording: RowSource, metrics: Rows) -> None:
    columns = ("rank", "name", "step", "unit", "value", "time_ns")
    for rank, number, step, unit, value, time_ns in zip(*(metrics[column].tolist() for column in columns), strict=True):
        name = recording.text(number)
        if math.isfinite(value):
            trace.add_counter(rank, name, time_ns, {"value": value})
        else:  # JSON has no such number, and a curve no such point, but the user must see it
            trace.add_instant(rank, "cell", f"{name} is {value:g}", time_ns, {STEP_UNITS[unit]: step})


def _add_resources(trace: Trace, resources: Rows) -> None:
    for row in resources:
        for name, (columns, unit) in _COUNTERS.items():
            values = {word: float(row[column]) / unit for word, column in columns.items()}
            known = {word: value for word, value in values.items() if math.isfinite(value) and value >= 0}
            if known:
                trace.add_counter(int(row["rank"]), name, int(row["time_ns"]), known)
