"""The publisher thread: its messages while ranks work, idle, hang or die, and at the end of the session."""

from __future__ import annotations

import gc
import threading
import time

import numpy as np
import pytest

from ddp_notebook.errors import DDPNotebookError, UsageError
from ddp_notebook.observe.recording import Recording
from ddp_notebook.widgets.feed.feed import Feed
from ddp_notebook.widgets.feed.messages import FeedMessage
from ddp_notebook.widgets.live_status import LiveStatus
from ddp_notebook.widgets.monitor import Monitor
from ddp_notebook.widgets.publisher import Publisher
from tests.conftest import is_within, wait_until
from tests.observe.batches import Rank
from tests.widgets.unpacking import unpack


class View:
    """The messages to one view."""

    def __init__(self, publisher):
        self.messages = []
        self.texts = {}
        self.head = {}
        self.ranks = {}
        publisher.add(self.tell)

    def tell(self, message):
        self.messages.append(message)
        self.texts |= dict(message.header["texts"])
        self.head |= message.header
        for row in unpack(message.header, message.data).get("rank", ()):
            words = {name: self.texts.get(int(row[name]), "") for name in ("state", "line", "last", "waits_for")}
            self.ranks[int(row["rank"])] = {**words, "rss": float(row["rss"])}


@pytest.fixture
def watched(make_session):
    """Start two ranks and a view of them."""
    session = make_session(2, hang_after_s=None)
    feed = Feed(session.recording)
    publisher = Publisher(feed, LiveStatus(feed, session._cells, "2 ranks, gloo"))
    yield session, View(publisher)
    publisher.close()


@pytest.mark.long
def test_it_tells_of_a_hang_who_waits_for_whom(watched):
    session, view = watched
    wait_until(lambda: view.ranks.get(1, {}).get("state") == "idle", what="idle")
    running = session.submit(
        "import time\nx = torch.ones(2)\ndist.all_reduce(x)\nif rank == 1:\n    time.sleep(60)\ndist.all_reduce(x)",
        quiet=True,
        timeout_s=8,
    )
    wait_until(lambda: view.head["state"] == "stuck", 10, "stuck")

    assert view.ranks[0]["state"] == "waiting"
    assert view.ranks[0]["waits_for"] == "rank 1 in all_reduce #2 (cell line 6)"
    assert view.ranks[1]["state"] == "running"
    assert view.ranks[1]["line"] == "cell line 5"
    assert view.ranks[1]["last"] == "all_reduce #1, cell line 3"
    assert view.head["why"] == "not arrived at all_reduce #2: rank 1 is at cell line 5"
    assert view.ranks[0]["rss"] > 1e7
    with pytest.raises(DDPNotebookError):
        running.result(30)
    wait_until(lambda: view.head["state"] == "idle", what="idle again")
    assert view.head["why"] == ""


@pytest.mark.alone
def test_logged_values_arrive_soon_and_in_few_messages(watched):
    session, view = watched
    code = "import time\nfor step in range(100):\n    log(sent=time.monotonic(), step=step)\n    time.sleep(0.02)"
    began = len(view.messages)
    began_s = time.monotonic()
    session.run(code, quiet=True)
    took_s = time.monotonic() - began_s
    wait_until(lambda: sum(len(rows) for _, rows in logged(view)) == 200, what="all that was logged")

    # Ranks on this machine have the clock of the notebook process.
    late_ms = sorted(told_ms - time_ms for told_ms, rows in logged(view) for time_ms in rows["time"].tolist())
    assert late_ms[int(len(late_ms) * 0.95)] < 300
    assert len(view.messages) - began <= 12 * took_s + 5


def logged(view):
    """Return the rows of metrics in deltas, each with the time at which the delta was sent, in ms of the recording."""
    found = []
    for message in view.messages:
        rows = unpack(message.header, message.data).get("metric")
        if rows is not None and message.header["kind"] == "delta":
            found.append((message.header["now_ms"], rows))
    return found


def test_a_rank_that_has_died_is_told(watched):
    session, view = watched
    with pytest.raises(DDPNotebookError):
        session.run("import os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)", quiet=True)

    wait_until(lambda: view.ranks.get(1, {}).get("state") == "died", what="died")
    assert "SIGKILL" in view.ranks[1]["line"]


def test_a_rank_that_has_left_is_told(watched):
    session, view = watched
    wait_until(lambda: view.ranks.get(1, {}).get("rss", 0) > 1e7, what="memory")
    session.ranks.resize(1)

    wait_until(lambda: view.ranks[1]["state"] == "left", what="left")
    assert np.isnan(view.ranks[1]["rss"])
    assert view.ranks[0]["state"] == "idle"


@pytest.mark.slow
def test_it_sleeps_where_nothing_comes_and_its_thread_ends():
    recording = Recording(1)
    feed = Feed(recording)
    publisher = Publisher(feed, LiveStatus(feed, None, ""))
    view = View(publisher)
    time.sleep(0.5)
    began, cpu_s = len(view.messages), publisher.cpu_s
    time.sleep(2.0)
    assert len(view.messages) - began <= 5
    assert publisher.cpu_s - cpu_s < 0.05

    rank = Rank(0)
    began_s = time.monotonic()
    recording._feed(rank.batch(rank.row("metric", name="loss", value=1.0, time_ns=time.monotonic_ns())))
    wait_until(lambda: logged(view), 1.0)
    assert is_within(time.monotonic() - began_s, 0.3)
    publisher.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "ddp-monitor"]
    assert not recording.listeners


def test_a_sink_that_fails_does_not_end_it():
    recording = Recording(1)
    feed = Feed(recording)
    publisher = Publisher(feed, LiveStatus(feed, None, ""))

    def fail(message):
        if message.header["kind"] != "snapshot":
            raise ZeroDivisionError

    publisher.add(fail)
    view = View(publisher)
    rank = Rank(0)
    try:
        for count, value in enumerate((1.0, 2.0), 1):
            recording._feed(rank.batch(rank.row("metric", name="loss", value=value, time_ns=time.monotonic_ns())))
            wait_until(lambda count=count: len(list(logged(view))) == count, what="the value is told")
        assert [rows["value"].tolist() for _, rows in logged(view)] == [[1.0], [2.0]]
    finally:
        publisher.close()


@pytest.mark.slow
def test_a_silent_view_gets_the_snapshot_again(monkeypatch):
    """In marimo, messages before its JavaScript runs are lost, and the view cannot send a request while a cell runs."""
    monkeypatch.setattr("ddp_notebook.widgets.publisher._AGAIN_S", (0.3, 0.9, 30.0))
    recording = Recording(1)
    rank = Rank(0)
    recording._feed(rank.batch(rank.row("metric", name="loss", value=3.0, time_ns=time.monotonic_ns())))
    feed = Feed(recording)
    publisher = Publisher(feed, LiveStatus(feed, None, ""))
    silent: list[FeedMessage] = []
    heard: list[FeedMessage] = []
    sure: list[FeedMessage] = []
    publisher.add(silent.append, may_miss=True)
    publisher.add(heard.append, may_miss=True)
    publisher.add(sure.append)
    publisher.heard(heard.append)

    def snapshots(messages):
        return [message for message in messages if message.header["kind"] == "snapshot"]

    try:
        wait_until(lambda: len(snapshots(silent)) == 3, 10, "two more snapshots")
        assert unpack(silent[-1].header, silent[-1].data)["metric"]["value"].tolist() == [3.0]
    finally:
        publisher.close()
    assert len(snapshots(heard)) == len(snapshots(sure)) == 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (None, r"^Monitor needs a recording, but no ranks are running"),
        ("run.npz", r"^'run.npz' is a path; load it: Monitor\(ddp_notebook.load\('run.npz'\)\)"),
        (3, r"^Monitor needs a session or a recording, got int"),
    ],
)
def test_what_a_monitor_cannot_show_is_named(wrong, words):
    with pytest.raises(UsageError, match=words):
        Monitor(wrong)
    with pytest.raises(TypeError):
        Monitor()  # type: ignore[call-arg]
    gc.collect()  # a warning about a widget that cannot be closed would be an error in a later test
