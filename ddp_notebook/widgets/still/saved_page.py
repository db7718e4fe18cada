"""A recording as one HTML page: the monitor with its data. The page needs no kernel and no network.

The page contains the bundled JavaScript and the messages of a monitor, compressed. It shows the picture and the text of
`saved_summary` until the messages are read, and if scripts are disabled.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
import os
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from ddp_notebook.observe.tables.matching import arrivals
from ddp_notebook.observe.tables.recorded import RecordedTables
from ddp_notebook.observe.tables.rpc_rows import latest
from ddp_notebook.observe.tables.store import keys_of
from ddp_notebook.observe.writing import in_a_folder, write_whole
from ddp_notebook.records.schema import CALL, SPAN, Rows
from ddp_notebook.widgets import bundles
from ddp_notebook.widgets.feed import rpc_bars, table_rows
from ddp_notebook.widgets.feed.feed import Feed
from ddp_notebook.widgets.feed.messages import FeedMessage
from ddp_notebook.widgets.feed.tables import empty, pack
from ddp_notebook.widgets.feed.timeline import Timeline
from ddp_notebook.widgets.live_status import LiveStatus
from ddp_notebook.widgets.still import saved_summary

# Row limits of a page, which keeps the newest rows. Same as in the browser (js/data/tables.js). 12 MB in total.
MOST = {"span": 131_072, "step": 65_536, "bucket": 65_536, "value": 32_768, "metric": 262_144}
_PAGE = Path(__file__).with_name("page.html")


def save(recording: RecordedTables, path: str | os.PathLike[str]) -> Path:
    """See `Recording.save_html`."""
    path = in_a_folder(path)
    page = html_of(recording).encode()
    write_whole(path, lambda file: file.write(page))
    return path


def html_of(recording: RecordedTables) -> str:
    """Return the page."""
    words = saved_summary.text(recording)
    found = message(recording)
    return Template(_PAGE.read_text(encoding="utf-8")).substitute(
        title=html.escape(words),
        picture=base64.b64encode(saved_summary.picture(recording)).decode(),
        module=_packed(bundles.monitor().encode()),
        header=_as_json(found.header),
        data=_packed(found.data),
    )


def message(recording: RecordedTables) -> FeedMessage:
    """Return a snapshot message with all data of a recording."""
    feed = Feed(recording, is_live=False)
    present = LiveStatus(feed, None, saved_summary.text(recording))
    feed.delta(feed.end_ns, present.head(), present.look(0.0))
    base = feed.snapshot(feed.end_ns, present.head()).header
    tables, begins_ms = _tables(feed)
    tables |= feed.metrics(MOST["metric"])
    if (ranks := present.look(10.0)) is not None:  # its texts are in the feed
        tables["rank"] = ranks
    notes: dict[str, Any] = {
        "dropped_rows": sum(recording.dropped.values()),
        "values_left_out": recording.store.left_out,
    }
    if begins_ms > 0:
        notes["page"] = f"the page holds the last rows: timeline, steps and tensors begin at {begins_ms / 1e3:.1f} s"
    packed, data = pack(tables)
    header = {**base, "run": "page", "steps_left_out": 0, "notes": notes, "tables": packed}
    header["texts"] = feed.texts.of(tables, base["layouts"])
    return FeedMessage(header, data)


def _tables(feed: Feed) -> tuple[dict[str, Rows], float]:
    """Return rows of the timeline and of tensors, and the time of the first rows."""
    recording = feed.recording
    spans, calls, values = (recording.rows(table) for table in ("span", "call", "value"))
    values = values[values["side"] < 2]  # others are gradients, which views request by name
    calls_between = latest(recording.rows("rpc"))
    begin_ns = _begin_ns(spans, calls, calls_between)
    spans = spans[(spans["end_ns"] < 0) | (spans["end_ns"] >= begin_ns)]
    calls = calls[arrivals(calls) >= begin_ns]
    found: dict[str, list[Rows]] = {name: [empty(name)] for name in ("span", "step", "bucket")}
    for cell in np.union1d(spans["cell"], calls["cell"]).tolist():
        timeline = Timeline(recording, cell, feed.start_ns, None)
        its_spans, its_calls = spans[spans["cell"] == cell], calls[calls["cell"] == cell]
        for more in (
            timeline.take(its_spans, its_calls, 0.0)[0],
            # the rest, which waits for rows that will not arrive
            timeline.take(np.zeros(0, SPAN), np.zeros(0, CALL), 10.0)[0],
        ):
            for name, rows in more.items():
                found[name].append(rows)
    calls_between = rpc_bars.within(calls_between, begin_ns, np.iinfo(np.int64).max, None)
    found["span"].append(rpc_bars.bars(recording, feed.texts, calls_between, feed.start_ns))
    tables = {name: np.concatenate(rows)[-MOST[name] :] for name, rows in found.items()}
    tables["span"] = tables["span"][np.argsort(tables["span"]["start"], kind="stable")]
    tables["value"] = _values(recording, values, calls)
    return tables, (begin_ns - feed.start_ns) / 1e6


def _begin_ns(spans: Rows, calls: Rows, remote_calls: Rows) -> int:
    """Return the time from which on there are at most as many rows as a page holds."""
    ends = np.concatenate((spans["end_ns"], arrivals(calls), remote_calls["end_ns"]))
    most = MOST["span"]
    return int(np.partition(ends, -most)[-most]) if len(ends) > most else -1


def _values(recording: RecordedTables, values: Rows, calls: Rows) -> Rows:
    """Return rows of `value` in the order of their calls, so that a limit keeps the last ones of all ranks."""
    if not len(calls) or not len(values):
        return empty("value")
    calls = calls[calls["call"] > 0]
    zero = np.uint64(0)
    known, wanted = (keys_of(rows["rank"], rows["call"], zero) for rows in (calls, values))
    order = np.argsort(known, kind="stable")
    at = np.minimum(np.searchsorted(known[order], wanted), len(known) - 1)
    is_there = known[order][at] == wanted
    values, calls = values[is_there], calls[order[at[is_there]]]
    last = np.argsort(calls["issue_ns"], kind="stable")[-MOST["value"] :]
    return table_rows.values(recording, values[last], calls[last])


def _packed(data: bytes) -> str:
    """Encode data for a script element, without characters that have a meaning in HTML. The result is deterministic."""
    return base64.b64encode(gzip.compress(data, 6, mtime=0)).decode()


def _as_json(value: Any) -> str:
    """Encode JSON for a script element, which would end at the first `</script`.

    Example:
        >>> _as_json("</script>")
        '"\\\\u003c/script>"'
    """
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
