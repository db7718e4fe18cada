"""Answers to a view's requests: a window of the timeline, steps, metrics, the values of a collective."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddp_notebook.observe.figures.moments import MOST_CALLS, calls_drawn
from ddp_notebook.observe.tables import rpc_rows
from ddp_notebook.observe.tables.matching import match_collectives, match_messages
from ddp_notebook.observe.tables.recorded import RecordedTables
from ddp_notebook.records.schema import Rows
from ddp_notebook.widgets.feed import rpc_bars as remote_calls
from ddp_notebook.widgets.feed import table_rows
from ddp_notebook.widgets.feed.feed import Feed
from ddp_notebook.widgets.feed.messages import FeedMessage
from ddp_notebook.widgets.feed.tables import empty

_SPANS = 4000  # spans per answer
_METRICS = 20_000  # most rows of an answer
_WHOLE_BYTES = 8 << 20  # whole tensors of an answer, as float32


def answer(asked: dict[str, Any], feed: Feed, now_ns: int) -> FeedMessage:
    """Return the answer to a request.

    Raises:
        ValueError, KeyError, TypeError: The request is invalid.
    """
    request = asked.get("request")
    match asked["what"]:
        case "spans":
            spans, left_out = _spans(feed, float(asked["t0"]), float(asked["t1"]), asked.get("ranks"))
            return feed.answer(request, now_ns, {"span": spans}, notes={"rows_left_out": left_out})
        case "steps":
            tables, every = feed.steps()
            return feed.answer(request, now_ns, tables, steps_left_out=0, steps_shown_of=every)
        case "values":
            values, data = _values(feed, *(int(asked[name]) for name in ("cell", "group", "number", "op")))
            return feed.answer(request, now_ns, values, data=data)
        case "calls":
            return feed.answer(request, now_ns, {}, notes=_calls(feed.recording))
        case "metrics":
            most = min(int(asked.get("most", _METRICS)), _METRICS)
            cells = asked.get("cells")
            tables = feed.metrics(most, asked.get("name"), None if cells is None else [int(one) for one in cells])
            return feed.answer(request, now_ns, tables)
        case what:
            raise ValueError(f"unknown request {what!r}")


def _spans(feed: Feed, t0_ms: float, t1_ms: float, ranks: Any) -> tuple[Rows, int]:
    """Return the spans and calls that overlap a window. If there are too many, return the longest: only those are
    visible."""
    begin_ns, end_ns = feed.start_ns + int(t0_ms * 1e6), feed.start_ns + int(t1_ms * 1e6)
    recording = feed.recording
    spans, calls = _rows(feed, "span"), _rows(feed, "call")
    spans = spans[(spans["start_ns"] < end_ns) & ((spans["end_ns"] > begin_ns) | (spans["end_ns"] < 0))]
    until_ns = np.maximum(calls["end_ns"], calls["issue_ns"] + calls["blocked_ns"])
    calls = calls[(calls["issue_ns"] < end_ns) & (until_ns > begin_ns)]
    waited = np.full(len(calls), -1, np.int64)
    for matched in (match_collectives(recording, calls), match_messages(recording, calls)):
        waited[matched.index] = matched.waited_ns
    its_calls = table_rows.calls(recording, calls, waited, feed.start_ns)
    between = remote_calls.within(recording.rows("rpc"), begin_ns, end_ns, feed.only)
    its_remote = remote_calls.bars(recording, feed.texts, between, feed.start_ns)
    found = np.concatenate((table_rows.spans(spans, feed.start_ns), its_calls, its_remote))
    if ranks is not None:
        found = found[np.isin(found["rank"], ranks)]
    left_out = max(0, len(found) - _SPANS)
    if left_out:
        longest = np.argpartition(-np.nan_to_num(found["end"] - found["start"], nan=np.inf), _SPANS)[:_SPANS]
        found = found[np.sort(longest)]
    return found, left_out


def _calls(recording: RecordedTables) -> dict[str, Any]:
    """Return the first calls between ranks of the last cell that made some, as plain data, and their total number."""
    found = [call for call in rpc_rows.calls(recording) if call.dst >= 0]
    cell = max((call.cell for call in found), default=0)
    found = [call for call in found if call.cell == cell]
    contexts = rpc_rows.contexts(recording, cell) if len(found) <= MOST_CALLS else []
    drawn = calls_drawn(found[:MOST_CALLS], rpc_rows.references(recording, cell) if found else [], contexts)
    return {"of_cell": cell, "in_all": len(found), "drawn": {**drawn, "world_size": recording.world_size}}


def _values(feed: Feed, cell: int, group: int, number: int, op: int) -> tuple[dict[str, Rows], bytes]:
    """Return the values of the tensors of a collective. Whole tensors are included if they were recorded."""
    recording = feed.recording
    calls = _rows(feed, "call")
    is_it = (calls["cell"] == cell) & (calls["group"] == group) & (calls["number"] == number) & (calls["op"] == op)
    calls = calls[is_it]
    rows = feed.values.of(calls)
    data, whole, at = [], [], 0
    shapes = {int(call["rank"]): int(call["shapes"]) for call in calls}
    for row in rows:
        rank, call, side = int(row["rank"]), int(row["call"]), int(row["side"])
        for tensor in _whole(recording, rank, call, side):
            if at + tensor.size <= _WHOLE_BYTES // 4:
                whole.append((rank, side, int(row["dtype"]), shapes.get(rank, 0), at, tensor.size))
                data.append(tensor.astype("<f4").tobytes())
                at += tensor.size
    table = empty("whole", len(whole))
    for place, one in enumerate(whole):
        table[place] = one
    return {"value": rows, "whole": table}, b"".join(data)


def _whole(recording: RecordedTables, rank: int, call: int, side: int) -> list[Any]:
    found = recording.tensor(rank, call, side)
    return [np.abs(one).ravel() if one.dtype.kind == "c" else one.ravel() for one in found]


def _rows(feed: Feed, table: str) -> Rows:
    rows = feed.recording.rows(table)
    rows = rows[rows["rank"] < feed.world_size]
    return rows if feed.only is None else rows[rows["cell"] == feed.only]
