"""Collectives and messages on the tracks of a trace, and the arrows between ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ddp_notebook.observe.tables.matching import Matched, RowSource, arrivals, match_collectives, match_messages
from ddp_notebook.observe.trace.tracks import Point, Slice, Trace
from ddp_notebook.observe.views import Step
from ddp_notebook.records.meaning import meaning
from ddp_notebook.records.operation import POINT_TO_POINT
from ddp_notebook.records.schema import CALL, ORIGINS, REDUCE_OPS, STATES, Rows
from ddp_notebook.records.words import format_ranks

_Parameters = Mapping[tuple[int, int, int], tuple[str, ...]]  # parameters by rank, issue time and bucket

_ISSUED = STATES.index("issued")


def add_calls(trace: Trace, recording: RowSource, calls: Rows, found_steps: Sequence[Step], end_ns: int) -> None:
    """Add calls to the tracks of their ranks.

    Args:
        calls: (n,) rows of `records.CALL`.
        found_steps: steps whose buckets have the names of parameters.
        end_ns: drawn end of pending calls.
    """
    collectives, messages = match_collectives(recording, calls), match_messages(recording, calls)
    parameters = {(one.rank, own.issue_ns, own.bucket): own.parameters for one in found_steps for own in one.buckets}
    slices = _slices(recording, calls, parameters, end_ns)
    for matched in (collectives, messages):
        _tell_waits(matched, calls, slices)
    tracks: dict[tuple[int, str], list[Slice]] = {}
    for rank, number, one in zip(calls["rank"].tolist(), calls["group"].tolist(), slices, strict=True):
        title = recording.group_of(number)["title"]
        track = "send and recv" if one.category == "p2p" else f"communication: {title}"
        tracks.setdefault((rank, track), []).append(one)
    # Sorted by name within a rank, because the order of first use may differ between ranks.
    for (rank, track), own in sorted(tracks.items(), key=lambda item: item[0]):
        trace.add_slices(rank, track, own, nests=False)
    for at in range(len(collectives)):
        rows = collectives.index[collectives.first[at] : collectives.first[at + 1]].tolist()
        chain = sorted((slices[row] for row in rows), key=lambda one: one.start_ns)
        trace.add_arrow(str(chain[0].args["op"]), "collective", [Point(one, one.start_ns) for one in chain])
    for at in range(len(messages)):
        pair = [slices[row] for row in messages.index[messages.first[at] : messages.first[at + 1]].tolist()]
        sends, receives = ([one for one in pair if one.args["op"] == op] for op in POINT_TO_POINT)
        if len(sends) == len(receives) == 1 and receives[0].end_ns >= sends[0].start_ns:
            # If the receive began first, the arrow ends at the begin of the send, so that no arrow points back in time.
            touched = max(receives[0].start_ns, sends[0].start_ns)
            trace.add_arrow("message", "p2p", [Point(sends[0], sends[0].start_ns), Point(receives[0], touched)])


def _slices(recording: RowSource, calls: Rows, parameters: _Parameters, end_ns: int) -> list[Slice]:
    """Return a slice for each row."""
    names = CALL.names or ()
    begins = arrivals(calls).tolist()
    found = []
    for begin, row in zip(begins, calls.tolist(), strict=True):
        of = dict(zip(names, row, strict=True))
        args = _args(recording, of, parameters)
        end = of["end_ns"]
        if end < 0:
            end = end_ns if of["state"] == _ISSUED else begin + of["blocked_ns"]
        op = args.setdefault("op", "unknown operation")  # the batch with its name may be lost
        found.append(
            Slice(
                name=f"{op} (bucket {of['bucket']})" if of["bucket"] >= 0 else op,
                category="p2p" if op in POINT_TO_POINT else "collective",
                start_ns=begin,
                end_ns=max(begin, end),
                args=args,
            )
        )
    return found


def _args(recording: RowSource, of: dict[str, Any], parameters: _Parameters) -> dict[str, Any]:
    group = recording.group_of(of["group"])
    text = recording.text
    found: dict[str, Any] = {
        "op": text(of["op"]),
        "number": of["number"],
        "group": group["title"],
        "ranks": format_ranks(group["ranks"]),
        "reduce_op": _word(REDUCE_OPS, of["reduce_op"]),
        "peer": of["peer"] if of["peer"] >= 0 else None,
        "tag": of["tag"] or None,
        "dtype": text(of["dtype"]),
        "shapes": _shapes(text(of["shapes"])),
        "bytes_in": of["nbytes_in"],
        "bytes_out": of["nbytes_out"],
        "origin": _word(ORIGINS, of["origin"]),
        "api": text(of["api"]),
        "site": text(of["site"]),
        "module": text(of["module"]),
        "meaning": meaning(_word(ORIGINS, of["origin"]), text(of["op"])) or None,
        "cell": of["cell"],
        "step": of["step"],
        "state": _word(STATES, of["state"]),
        "blocked_ms": of["blocked_ns"] / 1e6 if of["blocked_ns"] > 0 else None,
        "thread": of["thread"] or None,
    }
    if of["start_ns"] > of["issue_ns"]:
        found["issued_before_ms"] = (of["start_ns"] - of["issue_ns"]) / 1e6
    if of["bucket"] >= 0:
        found["bucket"] = of["bucket"]
        found["parameters"] = list(parameters.get((of["rank"], of["issue_ns"], of["bucket"]), ()))
    return {key: value for key, value in found.items() if value not in (None, "", [])}


def _tell_waits(matched: Matched, calls: Rows, slices: list[Slice]) -> None:
    last = calls["rank"][matched.index[matched.last]].tolist() if len(matched) else []
    waits = zip(matched.index.tolist(), matched.of.tolist(), matched.waited_ns.tolist(), strict=True)
    for row, number, waited_ns in waits:
        if waited_ns > 0:
            slices[row].args |= {"waited_ms": waited_ns / 1e6, "waited_for": f"rank {last[number]}"}


def _word(names: tuple[str, ...], code: int) -> str:
    return names[code] if code < len(names) else str(code)


def _shapes(text: str) -> Any:
    try:
        return json.loads(text) if text else []
    except ValueError:  # the text was lost or truncated
        return text
