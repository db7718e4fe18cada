"""Remote calls in the timeline of the monitor: messages to views, compared with the records of the ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddp_notebook.observe.recording import Recording
from ddp_notebook.rank.rpc.record.call_stack import numbered
from ddp_notebook.records.schema import RPC_KINDS, RPC_SIDES, Rows
from ddp_notebook.widgets.feed import browser_requests
from ddp_notebook.widgets.feed.feed import Feed
from ddp_notebook.widgets.feed.messages import FeedMessage
from ddp_notebook.widgets.feed.tables import KINDS, empty
from ddp_notebook.widgets.still import saved_page
from tests.observe.batches import Rank
from tests.widgets.unpacking import unpack

CALLER, CALLEE = range(len(RPC_SIDES))
REMOTE_CALL, EXECUTION = map(KINDS.index, ("remote call", "execution"))
BEGIN_NS, MS = 10**12, 10**6


def sent(rank: Rank, count: int, at_ms: float, *, kind: str = "rpc_sync", **of: Any) -> tuple[str, Rows]:
    """Return the caller's row of a call from rank 0 to rank 1 that takes 8 ms."""
    usual: dict[str, Any] = {"dst": 1, "src": 0, "function": "train", "site": "cell line 3", "nbytes": 100, "cell": 2}
    usual |= {"start_ns": BEGIN_NS + int(at_ms * MS), "end_ns": BEGIN_NS + int((at_ms + 8) * MS), "nbytes_back": -1}
    return rank.row("rpc", side=CALLER, number=numbered(0, count), kind=RPC_KINDS.index(kind), **(usual | of))


def ran(rank: Rank, count: int, at_ms: float, **of: Any) -> tuple[str, Rows]:
    """Return the callee's row, from 1 ms after the call was sent until 3 ms before the answer."""
    usual: dict[str, Any] = {"start_ns": BEGIN_NS + int((at_ms + 1) * MS), "end_ns": BEGIN_NS + int((at_ms + 5) * MS)}
    usual |= {"src": -1, "dst": 1, "done_ns": -1, "cell": 2}
    return rank.row("rpc", side=CALLEE, number=numbered(0, count), **(usual | of))


class Followed:
    """A recording of two ranks with a feed."""

    def __init__(self) -> None:
        self.recording = Recording(2)
        self.ranks = Rank(0), Rank(1)
        self.feed = Feed(self.recording)
        self.feed.start_ns = BEGIN_NS

    def told(self, at_ms: float) -> Rows:
        """Return the bars of remote calls in the next message."""
        return bars(self.feed.delta(BEGIN_NS + int(at_ms * MS), {}))


def bars(message: FeedMessage | None) -> Rows:
    rows: Rows = empty("span")
    if message is not None:
        rows = unpack(message.header, message.data).get("span", rows)
    return rows[np.isin(rows["kind"], (REMOTE_CALL, EXECUTION))]


def test_the_two_bars_of_a_call_travel_together():
    one = Followed()
    caller, callee = one.ranks
    one.recording._feed(callee.batch(ran(callee, 0, 0)))
    assert not len(one.told(200)) and one.feed.has_news()
    one.recording._feed(caller.batch(sent(caller, 0, 0), sent(caller, 1, 20), sent(caller, 7, 30, kind="torch")))
    message = one.feed.delta(BEGIN_NS + 400 * MS, {})
    assert message is not None
    call, execution = bars(message)
    texts = dict(message.header["texts"])

    assert (call["kind"], call["rank"], call["peer"]) == (REMOTE_CALL, 0, 1)
    assert (execution["kind"], execution["rank"], execution["peer"]) == (EXECUTION, 1, 0)
    assert call["call"] == execution["call"] == numbered(0, 0)
    assert [round(time, 4) for time in (call["start"], execution["start"], execution["end"], call["end"])] == [
        0,
        1,
        5,
        8,
    ]
    for row in (call, execution):
        assert (texts[row["name"]], texts[row["op"]], texts[row["site"]]) == ("train", "rpc_sync", "cell line 3")
    assert (call["nbytes"], np.isnan(execution["nbytes"])) == (100, True)
    one.recording._feed(callee.batch(ran(callee, 1, 20, error="ValueError('bad')", cell=7)))
    call, execution = one.told(600)
    assert (call["cell"], execution["cell"]) == (2, 2), "a callee whose own part of the cell has ended"
    assert execution["state"] == 2 and call["state"] == 1


def test_an_operator_is_sent_alone_if_its_callee_is_late():
    one = Followed()
    caller, callee = one.ranks
    one.recording._feed(caller.batch(sent(caller, 0, 0, function="torch.add", kind="rpc_async")))
    one.recording._feed(callee.batch(ran(callee, 9, 0)))  # its caller has no record of it
    assert not len(one.told(200))
    [call] = one.told(600)
    assert (call["kind"], call["peer"]) == (REMOTE_CALL, 1)
    assert one.feed.has_news()
    assert not len(one.told(4000)) and not one.feed.has_news(), "nothing waits for ever"


def test_a_flood_of_calls_is_thinned_by_whole_calls_and_said():
    one = Followed()
    caller, callee = one.ranks
    count, messages = 0, []
    for tick in range(30):  # 3 s, 1000 calls a second
        rows = [sent(caller, count + at, 100 * tick + at) for at in range(100)]
        its = [ran(callee, count + at, 100 * tick + at) for at in range(100)]
        count += 100
        one.recording._feed(caller.batch(*rows))
        one.recording._feed(callee.batch(*its))
        messages.append(one.feed.delta(BEGIN_NS + 100 * (tick + 1) * MS, {}))
    messages.append(one.feed.delta(BEGIN_NS + 4000 * MS, {}))

    each = [0 if message is None else message.nbytes for message in messages]
    assert max(sum(each[at : at + 10]) for at in range(21)) < 25_000, "in any second, with all that a message has"
    found = np.concatenate([shown for message in messages if len(shown := bars(message))])
    numbers, ends = np.unique(found["call"], return_counts=True)
    assert 100 < len(numbers) < 600 and (ends == 2).all()
    notes = [message.header["notes"] for message in messages if message and "notes" in message.header][-1]
    assert notes["remote_shown_of"] >= 4
    assert notes["rows_left_out"] == count - len(numbers)
    asked = {"what": "spans", "t0": 1000, "t1": 1010}
    window = bars(browser_requests.answer(asked, one.feed, 0))
    assert (window["kind"] == REMOTE_CALL).sum() == (window["kind"] == EXECUTION).sum() == 17


def test_a_view_that_opens_late_and_a_page_have_them_too():
    one = Followed()
    caller, callee = one.ranks
    one.recording._feed(caller.batch(*(sent(caller, at, 10 * at) for at in range(20))))
    one.recording._feed(callee.batch(*(ran(callee, at, 10 * at) for at in range(20))))
    for message in (
        Feed(one.recording).snapshot(0, {}),
        Feed(one.recording, only=2, is_live=False).snapshot(0, {}),
        saved_page.message(one.recording),
    ):
        found = bars(message)
        assert sorted(found["call"].tolist()) == sorted(2 * [numbered(0, at) for at in range(20)])
    assert not len(bars(Feed(one.recording, only=3).snapshot(0, {})))
    assert Feed(one.recording).cell == 2


def test_a_running_call_is_drawn_at_its_end_or_open_in_a_window():
    one = Followed()
    caller, callee = one.ranks
    one.recording._feed(caller.batch(sent(caller, 0, 0, end_ns=-1)))
    one.recording._feed(callee.batch(ran(callee, 0, 0, end_ns=-1)))
    assert not len(one.told(400)) and not one.feed.has_news()
    asked = {"what": "spans", "t0": 2, "t1": 3}
    for found in (bars(browser_requests.answer(asked, one.feed, 0)), bars(saved_page.message(one.recording))):
        assert [(row["state"], np.isnan(row["end"])) for row in found] == [(0, True), (0, True)]
    one.recording._feed(caller.batch(sent(caller, 0, 0)))
    one.recording._feed(callee.batch(ran(callee, 0, 0)))
    for found in (
        one.told(600),
        bars(browser_requests.answer(asked, one.feed, 0)),
        bars(saved_page.message(one.recording)),
    ):
        assert [(row["state"], round(row["end"] - found[0]["start"], 4)) for row in found] == [(1, 8), (1, 5)]
    came_late = caller.batch(sent(caller, 0, 0, end_ns=-1)), callee.batch(ran(callee, 0, 0, end_ns=-1))
    for batch in came_late:  # from threads that were about to report the open call when it ended
        one.recording._feed(batch)
    (call,) = one.recording.calls()
    assert not call.is_open and call.ended_ns is not None
