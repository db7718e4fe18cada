"""The messages to views, compared with the recording."""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from ddp_notebook.observe.recording import Recording
from ddp_notebook.records.codec import Batch
from ddp_notebook.records.schema import CALL, METRIC, RESOURCE
from ddp_notebook.widgets.feed import browser_requests, courses
from ddp_notebook.widgets.feed import feed as feed_module
from ddp_notebook.widgets.feed.feed import Feed
from ddp_notebook.widgets.feed.tables import KINDS
from ddp_notebook.widgets.live_status import LiveStatus
from tests.observe.batches import Rank
from tests.observe.synthetic import BEGIN_NS, simulate
from tests.observe.test_steps import with_remote_calls
from tests.widgets.unpacking import unpack

PARTS = ("input", "forward", "backward", "optimizer", "compute", "overlapped", "exposed", "waiting", "rest", "duration")


def recorded(run):
    recording = Recording(run.world_size)
    for batch in run.batches():
        recording._feed(batch)
    return recording


def play(run, feed, recording, tick_ms=100):
    """Feed the batches of the ranks in the order of time. Yield the messages to views."""
    time_of = {
        "call": "end_ns",
        "span": "end_ns",
        "rpc": "end_ns",
        "layout": "time_ns",
        "value": None,
        "metric": "time_ns",
    }
    batches = run.batches()
    now_ns = BEGIN_NS
    last_ns = max(int(run.rows("span")["end_ns"].max()), int(run.rows("call")["end_ns"].max(initial=0)))
    while now_ns < last_ns + 600_000_000:
        for batch in batches:
            tables = {}
            for name, rows in batch.tables.items():
                if (column := time_of.get(name)) is not None:
                    tables[name] = rows[(rows[column] >= now_ns) & (rows[column] < now_ns + tick_ms * 1_000_000)]
            recording._feed(Batch(rank=batch.rank, stream=batch.stream, texts=batch.texts, tables=tables))
        now_ns += tick_ms * 1_000_000
        if (message := feed.delta(now_ns, {"state": "running"})) is not None:
            yield message


def gathered(messages):
    found = defaultdict(list)
    for message in messages:
        for name, rows in unpack(message.header, message.data).items():
            found[name].append(rows)
    return {name: np.concatenate(parts) for name, parts in found.items()}


def check_steps(rows, recording):
    true = {(one.rank, one.step): one for one in recording.steps()}
    assert len(rows) > 0
    for row in rows:
        one = true[int(row["rank"]), int(row["step"])]
        for part in PARTS:
            assert row[part] == pytest.approx(getattr(one, f"{part}_ns") / 1e6, abs=1e-3), (part, one)
        assert row["samples"] == (-1 if one.samples is None else one.samples)
    return true


SCENES: dict[str, dict[str, Any]] = {
    "even": {},
    "a slow rank": {"slow": 2, "phase": "forward", "extra_ms": 50},
    "noise": {"noise_ms": 3},
    "accumulated gradients": {"micro_steps": 3},
    "no DDP": {"is_ddp": False},
    "clocks apart": {"clock_error_ns": 200_000},
    "a thread for each step": {"threads": 7},
}


@pytest.mark.parametrize("scene", SCENES)
def test_steps_and_buckets_of_the_feed_equal_the_recording(scene):
    recording = recorded(simulate(**SCENES[scene]))
    tables = gathered([Feed(recording, is_live=False).snapshot(0, {})])

    true = check_steps(tables["step"], recording)
    newest = {key: one for key, one in true.items() if key[1] > max(step for _, step in true) - 5}
    shown = {(int(row["rank"]), int(row["step"])) for row in tables["step"]}
    assert newest.keys() <= shown
    if "bucket" in tables:
        of_step = defaultdict(list)
        for row in tables["bucket"]:
            of_step[int(row["rank"]), int(row["step"])].append(row)
        origin = Feed(recording, is_live=False).start_ns
        for key, one in newest.items():
            assert [int(row["bucket"]) for row in of_step[key]] == [bucket.bucket for bucket in one.buckets]
            for row, bucket in zip(of_step[key], one.buckets, strict=True):
                assert row["start"] == pytest.approx((bucket.issue_ns - origin) / 1e6, abs=1e-4)
                assert row["end"] == pytest.approx((bucket.end_ns - origin) / 1e6, abs=1e-4)
                assert row["nbytes"] == bucket.nbytes


def test_answers_of_other_ranks_count_as_waiting():
    over, run = recorded(with_remote_calls()), with_remote_calls()
    recording = Recording(2)
    feed = Feed(recording)
    feed.start_ns = BEGIN_NS
    shown = [gathered([Feed(over, is_live=False).snapshot(0, {})]), gathered(play(run, feed, recording))]
    for tables in shown:
        assert len(check_steps(tables["step"], over)) == len(tables["step"]) == 2
        assert [round(row["waiting"]) for row in tables["step"]] == [50, 50]


@pytest.mark.long
@pytest.mark.parametrize("world_size", [2, 64])
def test_who_comes_late_gets_the_last_steps_of_all_ranks(world_size):
    recording = recorded(simulate(world_size=world_size, steps=100, buckets=7))
    for only in (None, 1):
        tables = gathered([Feed(recording, only, is_live=False).snapshot(0, {})])
        for table in ("step", "bucket"):
            ranks_of = defaultdict(set)
            for row in tables[table]:
                ranks_of[int(row["step"])].add(int(row["rank"]))
            assert max(ranks_of) == 99
            assert all(ranks == set(range(world_size)) for ranks in ranks_of.values()), table


@pytest.mark.slow
@pytest.mark.parametrize("scene", SCENES)
def test_what_is_told_piece_by_piece_is_the_same(scene):
    run = simulate(steps=30, **SCENES[scene])
    recording = Recording(4)
    feed = Feed(recording)
    feed.start_ns = BEGIN_NS
    tables = gathered(play(run, feed, recording))

    assert len(check_steps(tables["step"], recording)) == len(tables["step"]), "every step of every rank, once"
    calls = recording.rows("call")
    told = tables["span"][tables["span"]["kind"] == KINDS.index("collective")]
    assert sorted(zip(told["rank"].tolist(), told["call"].astype(int).tolist(), strict=True)) == sorted(
        zip(calls["rank"].tolist(), calls["call"].tolist(), strict=True)
    )
    waited = {
        (rank, wait.number): ns / 1e6
        for wait in recording.waits()
        for rank, ns in zip(wait.ranks, wait.waited_ns.tolist(), strict=True)
    }
    for row in told:
        assert row["wait"] == pytest.approx(waited[int(row["rank"]), int(row["number"])], abs=1e-3)
    assert len(tables["span"]) - len(told) == len(recording.rows("span"))


@pytest.mark.long
def test_thinned_steps_of_a_fast_start_are_sent_on_request():
    fast = simulate(world_size=8, steps=60, input_ms=0.5, forward_ms=1, backward_ms=2, optimizer_ms=0.5)
    run = simulate(world_size=8, steps=30, into=fast, input_ms=20, forward_ms=150, backward_ms=150)
    recording = Recording(8)
    feed = Feed(recording)
    feed.start_ns = BEGIN_NS
    messages = list(play(run, feed, recording))
    notes = [message.header["notes"] for message in messages if "notes" in message.header][-1]
    assert notes["units_shown_of"] == 1, "the last steps are shown, each of them"
    assert notes["rows_left_out"] > 0
    counts = [len({int(row["step"]) for row in gathered(told)["step"]}) for told in (messages, [_steps(feed)])]
    assert counts[0] < counts[1] == len({one.step for one in recording.steps()})
    assert _steps(feed).header["steps_shown_of"] == 1


def _steps(feed):
    return browser_requests.answer({"what": "steps"}, feed, 0)


def test_sequence_numbers_grow_by_one_and_follow_a_late_snapshot():
    run = simulate(steps=20)
    recording = Recording(4)
    feed = Feed(recording)
    feed.start_ns = BEGIN_NS
    seen, known, late = [], {0}, None
    for message in play(run, feed, recording):
        seen.append(message.header["seq"])
        if late is not None:
            known |= {number for number, _ in message.header["texts"]}
            tables = unpack(message.header, message.data)
            for name in ("name", "op", "group", "site"):
                assert set(tables.get("span", np.zeros(0, [(name, "u4")]))[name].tolist()) <= known, (
                    "all texts are told"
                )
        if message.header["seq"] == 4:
            late = feed.snapshot(0, {})
            known |= {number for number, _ in late.header["texts"]}
            assert late.header["seq"] == 4
    assert seen == list(range(1, len(seen) + 1))


@pytest.mark.slow
def test_whole_steps_are_left_out_and_sent_on_request(monkeypatch):
    run = simulate(
        world_size=8, steps=100, input_ms=0.5, forward_ms=1, backward_ms=2, optimizer_ms=0.5, transfer_ms=0.1
    )
    recording = Recording(8)
    feed = Feed(recording)
    feed.start_ns = BEGIN_NS
    messages = list(play(run, feed, recording))
    tables = gathered(messages)

    notes = [message.header["notes"] for message in messages if "notes" in message.header][-1]
    assert notes["units_shown_of"] > 1
    assert notes["rows_left_out"] > 0
    ranks_of = defaultdict(set)
    for row in tables["step"]:
        ranks_of[int(row["step"])].add(int(row["rank"]))
    assert 0 < len(ranks_of) < 100
    assert all(ranks == set(range(8)) for ranks in ranks_of.values()), "a step is shown on all ranks or on none"

    asked = browser_requests.answer({"what": "steps"}, feed, 0)
    assert asked.header["steps_shown_of"] == 1
    whole = gathered([asked])
    check_steps(whole["step"], recording)
    starts = {(int(row["rank"]), int(row["step"])): float(row["start"]) for row in whole["step"]}
    assert starts.keys() == {(rank, step) for rank in range(8) for step in range(100)}
    for row in tables["step"]:
        assert starts[int(row["rank"]), int(row["step"])] == pytest.approx(float(row["start"]), abs=1e-3)
    monkeypatch.setattr(feed_module, "_HISTORY", 1000)  # rows, so that the first steps are not measured again
    asked = browser_requests.answer({"what": "steps"}, feed, 0)
    assert asked.header["steps_shown_of"] >= notes["units_shown_of"]
    assert 0 < len(gathered([asked])["step"]) < 800
    check_steps(tables["step"], recording)
    seconds = (BEGIN_NS + messages[-1].header["now_ms"] * 1e6 - BEGIN_NS) / 1e9
    assert sum(message.nbytes for message in messages) / max(seconds, 1) < 60_000


def logs(rank: Rank, cell: int, values: Any, name: str = "loss") -> Any:
    """Return a batch of a rank that logs these values, one in each step."""
    rows = [rank.row("metric", name=name, cell=cell, step=at, value=value) for at, value in enumerate(values)]
    return rank.batch(*rows)


def metrics_of(message: Any, cell: int) -> tuple[Any, dict[str, float]]:
    """Return the rows of a cell, and its row of `course`."""
    tables = unpack(message.header, message.data)
    [course] = tables["course"][tables["course"]["cell"] == cell]
    return tables["metric"][tables["metric"]["cell"] == cell], {
        name: float(course[name]) for name in course.dtype.names
    }


@pytest.mark.slow
def test_a_snapshot_thins_all_cells_but_the_newest():
    """The second cell was drawn as a single dot."""
    recording = Recording(2)
    early = np.sin(np.arange(20_000) / 500)
    early[777], early[778] = 99, -99
    for number in range(2):
        recording._feed(logs(rank := Rank(number, number + 1), 1, early))
        recording._feed(logs(rank, 2, np.arange(64) + number))
    feed = Feed(recording)
    message = feed.snapshot(0, {})

    newest, course = metrics_of(message, 2)
    assert newest["value"].tolist() == [*range(64), *range(1, 65)]
    assert (course["points"], course["begin"], course["end"]) == (128, 0, 63)
    before, course = metrics_of(message, 1)
    assert course["points"] == 40_000 and 400 < len(before) < 1600
    for number in range(2):
        own = before[before["rank"] == number]
        assert {99, -99} <= set(own["value"].tolist()) and {0, 19_999} <= set(own["step"].tolist())
        assert own["value"].tolist() == pytest.approx(early[own["step"].astype(int)].tolist())
    [name] = [number for number, text in message.header["texts"] if text == "loss"]
    asked = {"request": 7, "what": "metrics", "name": name, "cells": [1], "most": 5000}
    answer = browser_requests.answer(asked, feed, 0)
    assert answer.header["request"] == 7
    rows, course = metrics_of(answer, 1)
    assert 4000 < len(rows) <= 5000 and course["points"] == 40_000


def test_a_snapshot_and_an_answer_are_as_old_as_the_last_delta():
    """A view replaces its rows with these rows, and appends later rows."""
    rank, recording = Rank(0), Recording(1)
    feed = Feed(recording)
    recording._feed(logs(rank, 1, range(10)))
    feed.delta(BEGIN_NS, {})
    recording._feed(logs(rank, 2, range(7)))
    for message in (feed.snapshot(0, {}), browser_requests.answer({"what": "metrics"}, feed, 0)):
        assert unpack(message.header, message.data)["metric"]["cell"].tolist() == [1] * 10
    later = feed.delta(BEGIN_NS + 10**9, {})
    assert later is not None and metrics_of(later, 2)[0]["value"].tolist() == list(range(7))


@pytest.mark.long
def test_a_flood_of_metrics_keeps_minimum_maximum_and_count():
    rank, recording = Rank(0), Recording(1)
    feed = Feed(recording)
    values = np.random.default_rng(3).random(60_000)
    messages, now_ns = [], BEGIN_NS
    for at in range(0, 60_000, 1000):  # for 6 s
        rows = [
            rank.row("metric", name="loss", cell=1, step=at + more, value=values[at + more]) for more in range(1000)
        ]
        recording._feed(rank.batch(*rows))
        now_ns += 100_000_000
        if (message := feed.delta(now_ns, {})) is not None:
            messages.append(message)
    assert not feed.has_news()
    tables = gathered(messages)
    assert tables["course"]["points"].sum() == 60_000
    rows = tables["metric"]
    assert {values.argmin(), values.argmax(), 59_999} <= set(rows["step"].astype(int).tolist())
    assert rows["value"].tolist() == pytest.approx(values[rows["step"].astype(int)].tolist())
    assert sum(message.nbytes for message in messages) / 6 < 20_000
    for message in messages:
        own = unpack(message.header, message.data)["metric"]["step"].astype(int)
        part = values[own[0] : own[-1] + 1]
        assert part.min() == values[own].min() and part.max() == values[own].max()


def test_values_of_a_collective_that_all_ranks_know_are_told():
    ranks = [Rank(0), Rank(1)]
    recording = Recording(2)
    feed = Feed(recording)
    now_ns = time.monotonic_ns()
    for one in ranks:
        call = one.call(cell=1, issue_ns=now_ns, end_ns=now_ns + 1000)
        values = [one.values(1, 0, [1.0 + one.rank, 2.0]), one.values(1, 1, [3.0, 4.0], dtype="float32")]
        recording._feed(one.batch(call, *values))
    message = feed.delta(now_ns + 10**8, {})
    assert message is not None
    value = unpack(message.header, message.data)["value"]

    assert value["first"][:, :2].tolist() == [[1.0, 2.0], [3.0, 4.0], [2.0, 2.0], [3.0, 4.0]]
    texts = dict(message.header["texts"])
    assert (texts[value["op"][0]], texts[value["shape"][0]], texts[value["group"][0]]) == (
        "all_reduce",
        "[[2, 3]]",
        "default",
    )
    assert value["count"].tolist() == [2] * 4
    json.dumps(message.header, allow_nan=False)


def test_values_of_many_calls_of_a_rank_belong_to_their_own_call():
    ranks = [Rank(0), Rank(1)]
    recording = Recording(2)
    for one in ranks:  # all rows of one rank before those of the other
        rows = []
        for number in range(1, 101):
            op, shapes = ("broadcast", [[1]]) if number % 2 else ("all_reduce", [[2, 3]])
            rows += [
                one.call(op, cell=1, shapes=shapes, issue_ns=1000 * number, end_ns=1000 * number + 9),
                one.values(number, 1, [float(number)]),
                one.values(number, 2, [-1.0], name="weight"),  # a gradient: this is the number of a span, not of a call
            ]
        recording._feed(one.batch(*rows))
    feed = Feed(recording, is_live=False)
    message = feed.snapshot(0, {})
    value, texts = unpack(message.header, message.data)["value"], dict(message.header["texts"])

    assert value["number"].tolist() == np.repeat(range(85, 101), 2).tolist(), "the last ones, on both ranks"
    assert value["rank"].tolist() == [0, 1] * 16
    assert value["first"][:, 0].tolist() == value["number"].tolist()
    for row in value:
        told = texts[int(row["op"])], texts[int(row["shape"])]
        assert told == (("broadcast", "[[1]]") if row["number"] % 2 else ("all_reduce", "[[2, 3]]"))


def test_the_newest_values_are_sent_later_after_a_burst():
    ranks = [Rank(number) for number in range(8)]
    recording = Recording(8)
    feed = Feed(recording)
    begin_ns = time.monotonic_ns()
    group = {"name": "0", "title": "default", "ranks": list(range(8))}

    def call(number: int) -> None:
        at_ns = begin_ns + number * 10_000_000
        for one in ranks:
            values = [one.values(number, side, [float(number)] * 32) for side in (0, 1)]
            recording._feed(one.batch(one.call(cell=1, group=group, issue_ns=at_ns, end_ns=at_ns + 1000), *values))

    def told(tick: int) -> list[float]:
        message = feed.delta(begin_ns + tick * 210_000_000, {})
        rows = None if message is None else unpack(message.header, message.data).get("value")
        return [] if rows is None else rows["first"][:, 0].tolist()

    call(1)
    call(2)
    call(3)
    assert told(1)[-1] == 3.0, "the newest"
    call(4)
    assert told(2) == [], "too much was told"
    assert feed.has_news()
    assert 4.0 in [value for tick in range(3, 20) for value in told(tick)]


def test_a_window_can_be_asked_for():
    recording = recorded(simulate(steps=20, slow=1, phase="backward", extra_ms=30))
    feed = Feed(recording, is_live=False)
    [one] = [step for step in recording.steps() if (step.rank, step.step) == (2, 7)]

    begin_ms, end_ms = (one.start_ns - feed.start_ns) / 1e6, (one.end_ns - feed.start_ns) / 1e6
    asked = {"what": "spans", "t0": begin_ms, "t1": end_ms, "ranks": [2]}
    spans = gathered([browser_requests.answer(asked, feed, 0)])["span"]
    assert set(spans["rank"]) == {2}
    assert ((spans["start"] < end_ms) & (spans["end"] > begin_ms)).all()
    kinds = {KINDS[kind] for kind in spans["kind"]}
    assert kinds == {"cell", "forward", "backward", "optimizer", "input", "collective"}


def test_a_feed_of_64_ranks_begins_with_little():
    recording = recorded(simulate(world_size=64, steps=12))
    began_s = time.process_time()
    message = Feed(recording, is_live=False).snapshot(0, {})

    assert message.nbytes < 40_000
    assert time.process_time() - began_s < 2
    json.dumps(message.header, allow_nan=False)


@pytest.mark.parametrize("world_size", [1, 4])
def test_a_feed_during_a_resize_reports_only_its_known_ranks(world_size):
    """The recording has the new world_size first, and rows of new ranks can arrive before the feed is replaced."""
    recording = Recording(2)
    feed = Feed(recording)
    present = LiveStatus(feed, None, "ranks")
    recording.world_size = world_size
    for rank in range(world_size):
        rows = np.zeros(1, RESOURCE)
        rows["rank"], rows["time_ns"], rows["rss_bytes"] = rank, BEGIN_NS, 100 + rank
        calls = np.zeros(1, CALL)
        calls["rank"], calls["issue_ns"], calls["end_ns"] = rank, BEGIN_NS, BEGIN_NS + 1000
        recording._feed(Batch(rank=rank, stream=rank, texts={}, tables={"resource": rows, "call": calls}))
    ranks = present.look(time.monotonic())
    message = feed.delta(BEGIN_NS + 10**9, {}, ranks)
    assert message is not None and message.header["world_size"] == min(2, world_size)
    found = unpack(message.header, message.data)["rank"]
    assert found["rank"].tolist() == list(range(min(2, world_size)))
    feed.snapshot(BEGIN_NS + 10**9, {})


# ---- many names


def many_names(recording, cell, count, value=0.0):
    rank = Rank(0, stream=cell)
    recording._feed(
        rank.batch(*(rank.row("metric", name=f"x{at} of {cell}", value=value, cell=cell) for at in range(count)))
    )


def names_of(message):
    known = dict(message.header["texts"])
    return {known[number] for number in np.unique(unpack(message.header, message.data)["metric"]["name"]).tolist()}


def test_the_first_names_of_each_cell_are_sent_with_a_note():
    recording = Recording(1)
    feed = Feed(recording)
    many_names(recording, 1, 1000)
    made = (feed.delta(tick * 10**8, {}) for tick in range(1, 200))
    message = next(one for one in made if one is not None and names_of(one))
    assert names_of(message) == {f"x{at} of 1" for at in range(256)}
    words = "the first 256 metrics of cell 1 are drawn; 744 more are not"
    assert feed.notes()["metrics"] == words == message.header["notes"]["metrics"]

    many_names(recording, 2, 3)
    later = Feed(recording)
    assert {"x0 of 2", "x1 of 2", "x2 of 2"} < names_of(later.snapshot(0, {})), "the newest cell comes first"
    assert later.notes()["metrics"] == words
    assert feed.notes()["metrics"] == words


def test_rows_that_wait_for_room_are_bounded_and_counted(monkeypatch):
    monkeypatch.setattr(courses, "_MOST_WAITING", 2000)
    flow = courses.Flow(bytes_per_s=1000)
    flow._most_waiting = 2000
    for step in range(200):
        rows = np.zeros(100, METRIC)
        rows["rank"], rows["name"], rows["cell"], rows["step"] = np.arange(100), 7, 1, step
        rows["value"] = 1e6 if step == 77 else step
        flow.add(rows)
        assert len(flow._waiting) <= 2100
        kept, sizes = flow.take(0.001)
        assert not len(kept) and not len(sizes)
    kept, sizes = flow.take(60)
    assert sizes[["cell", "name", "points", "begin", "end"]].tolist() == [(1, 7, 20_000, 0, 199)]
    assert kept["value"].max() == 1e6 and len(np.unique(kept["rank"])) == 100
    assert not flow.is_waiting


def test_a_page_that_is_saved_while_ranks_log_gets_all_rows():
    flow = courses.Flow(bytes_per_s=math.inf)
    rows = np.zeros(1000, METRIC)
    flow.add(rows)
    assert [len(flow.take(seconds=seconds)[0]) for seconds in (0.5, 0.5)] == [1000, 0]
