"""Remote calls on the tracks of a trace, and the arrows from callers to callees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddp_notebook.observe.remote import RemoteCall
from ddp_notebook.observe.trace.tracks import Point, Slice, Trace

MADE, EXECUTED = "remote calls made", "remote calls executed"


def add_remote(trace: Trace, calls: Sequence[RemoteCall], end_ns: int) -> None:
    """Put them on the tracks of their ranks.

    Args:
        calls: in the order in which they were sent.
        end_ns: until then one is drawn whose end is not known.
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
        if run.end_ns >= made.start_ns:  # else clocks of two hosts differ by more than the call took
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
