"""Recorded data can be queried, as text and on one clock."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from ddp_notebook.errors import MissingPackageError, UsageError
from ddp_notebook.observe.files import load
from ddp_notebook.observe.recording import Recording
from ddp_notebook.observe.tables import store
from ddp_notebook.observe.tables.metric_thinning import Earlier
from ddp_notebook.records.codec import Batch, Tensor
from ddp_notebook.records.schema import METRIC, ORIGINS, SIDES, SPANS, STATES
from tests.observe.batches import Rank, there
from tests.observe.synthetic import simulate

S = 10**9


def two_ranks():
    recording = Recording(2)
    for rank in (Rank(1), Rank(0)):  # each numbers its texts in its own order
        rank.text(f"only of rank {rank.rank}")
        last = {"state": STATES.index("done"), "origin": ORIGINS.index("ddp"), "module": "DDP(Net)", "bucket": 0}
        recording._feed(rank.batch(rank.call("all_reduce", reduce_op=1, end_ns=9, **last), rank.values(1, 0, [1.0, 3])))
        recording._feed(rank.batch(rank.call("send", peer=1, cell=2), rank.values(1, 1, [2.0]), rank.values(2, 0, [7])))
        side = {"name": "pair", "title": "rows", "ranks": [0, 1]}
        recording._feed(rank.batch(rank.call("all_reduce", group=side, cell=2, shapes=[[], [4]])))
    return recording


def test_collectives_are_told_in_words():
    one = two_ranks().collectives(rank=1)[0]

    assert (one.rank, one.call, one.op, one.api, one.number) == (1, 1, "all_reduce", "all_reduce", 1)
    assert (one.group, one.group_name, one.ranks) == ("default", "0", (0, 1))
    assert (one.reduce_op, one.dtype, one.shapes) == ("SUM", "float32", ((2, 3),))
    assert (one.origin, one.state, one.module, one.bucket, one.peer) == ("ddp", "done", "DDP(Net)", 0, None)
    assert (one.issue_ns, one.start_ns, one.end_ns) == (5, 5, 9)
    came = there(one.input)
    assert came.first.tolist() == [1, 3]
    assert (came.low, came.high, came.mean, came.numel) == (1, 3, 2, 2)
    assert not came.is_sample
    assert there(one.output).first.tolist() == [2]


def test_collectives_can_be_chosen():
    recording = two_ranks()

    assert len(recording.collectives()) == 6
    assert {one.op for one in recording.collectives(op="all_reduce")} == {"all_reduce"}
    assert [one.rank for one in recording.collectives(op="send")] == [1, 0]
    assert [one.peer for one in recording.collectives(op="send", rank=0)] == [1]
    assert recording.collectives(op="send")[0].is_point_to_point
    assert len(recording.collectives(op="all_gather")) == 0
    for name in ("rows", "pair"):
        assert [one.group_name for one in recording.collectives(group=name)] == ["pair", "pair"]
        assert recording.collectives(group=name)[0].shapes == ((), (4,))
    assert len(recording.collectives(group="default", rank=[0, 1])) == 4
    assert len(recording.collectives(cell=2, rank=np.int64(1))) == 2
    assert len(recording.collectives(group="other")) == 0


def test_collectives_are_a_sequence():
    calls = two_ranks().collectives()

    assert [one.call for one in calls] == [1, 2, 3, 1, 2, 3]
    assert [calls[at].call for at in (0, -1)] == [1, 3]
    assert [one.call for one in calls[1:3]] == [2, 3]
    assert list(calls[:0]) == []
    assert len(calls.rows) == 6
    with pytest.raises(IndexError, match=r"^call 6 does not exist; the number of calls is 6$"):
        calls[6]
    assert repr(calls) == "<Collectives: 6 calls of ranks 0-1: 4 all_reduce, 2 send>"
    assert repr(calls[:0]) == "<Collectives: none>"


def test_an_unknown_rank_operation_or_table_raises_an_error():
    with pytest.raises(UsageError, match=r"^rank 2 does not exist; the ranks are 0 to 1$"):
        two_ranks().collectives(rank=2)
    with pytest.raises(UsageError, match="op must be an operation such as all_reduce, "):
        two_ranks().collectives("allreduce")
    with pytest.raises(UsageError, match="op must be an operation such as send, recv, all_reduce, "):
        two_ranks().collectives("x")
    with pytest.raises(UsageError, match=r"^unknown table 'calls'; the tables are call, value, span, "):
        two_ranks().rows("calls")


def test_texts_that_were_never_told_are_empty():
    recording, rank = Recording(1), Rank(0)
    call = rank.call("all_reduce")
    rank.batch()  # its texts are lost
    recording._feed(rank.batch(call, rank.call("send")))
    first, second = recording.collectives()

    assert (first.op, first.group, first.ranks, first.shapes) == ("", "", (), ())
    assert second.op == "send"


def test_metrics():
    recording = Recording(2)
    for number in (0, 1):
        rank = Rank(number)
        for step in range(3):
            row = {"step": step, "cell": 4, "time_ns": step * 10}
            loss = rank.row("metric", name="loss", value=number + step / 10, **row)
            recording._feed(rank.batch(loss, rank.row("metric", name="accuracy", value=0.5, **row)))
    metrics = recording.metrics

    assert list(metrics) == ["loss", "accuracy"]
    steps, values = metrics["loss"].of_rank(1)
    assert steps.tolist() == [0, 1, 2]
    assert values.tolist() == [1.0, 1.1, 1.2]
    assert metrics["loss"].times_ns.tolist() == [0, 10, 20] * 2
    assert metrics["accuracy"].cells.tolist() == [4] * 6


def test_times_are_corrected_when_they_are_asked_for():
    recording = Recording(2)
    for number in (0, 1):
        rank = Rank(number)
        call = rank.call(issue_ns=10 * S, blocked_ns=7)
        recording._feed(rank.batch(call, rank.row("resource", time_ns=11 * S, rss_bytes=5)))
    calls = recording.collectives()

    assert recording.clock_error_ns(1) == 0
    recording.clock.add(1, sent_ns=10 * S, rank_ns=14 * S, received_ns=10 * S + 200)
    recording.clock.add(0, sent_ns=10 * S, rank_ns=10 * S, received_ns=10 * S + 200, same_clock=True)
    assert [one.issue_ns for one in calls] == [10 * S, 10 * S]
    assert [one.issue_ns for one in recording.collectives()] == [10 * S, 6 * S + 100]
    assert [(one.start_ns, one.end_ns, one.blocked_ns) for one in recording.collectives()][1] == (6 * S + 100, None, 7)
    assert recording.resources["time_ns"].tolist() == [11 * S, 7 * S + 100]
    assert recording.follow("call", 1)[0]["issue_ns"].tolist() == [6 * S + 100]
    assert [recording.clock_error_ns(rank) for rank in (0, 1)] == [0, 100]


def test_rows_keep_the_clock_that_their_rank_had(tmp_path):
    recording = Recording(2, capacity={"call": 6})
    ranks = [Rank(0), Rank(1)]

    def feed(*issued_ns: int) -> None:
        for rank, issue_ns in zip(ranks, issued_ns, strict=True):
            recording._feed(rank.batch(rank.call(issue_ns=issue_ns)))

    for second in (1, 2):  # older ones are dropped when others arrive
        feed(second * S, (second + 100) * S)
    recording.clock.add(1, sent_ns=2 * S, rank_ns=102 * S, received_ns=2 * S)
    recording._part_from_clock(1)
    feed(3 * S, 1003 * S)
    recording.clock.add(1, sent_ns=3 * S, rank_ns=1003 * S, received_ns=3 * S)
    recording._part_from_clock(1)
    feed(4 * S, 54 * S)
    recording.clock.add(1, sent_ns=4 * S, rank_ns=54 * S, received_ns=4 * S)

    again = load(recording.save(tmp_path / "run.npz"))
    for one in (recording, again, load(again.save(tmp_path / "again.npz"))):
        assert one.rows("call")["issue_ns"].tolist() == [2 * S, 2 * S, 3 * S, 3 * S, 4 * S, 4 * S]
    assert recording.follow("call", 5)[0]["issue_ns"].tolist() == [3 * S, 4 * S, 4 * S]


def test_readers_follow_at_their_own_pace():
    recording, rank = Recording(1, capacity={"call": 4}), Rank(0)
    place, seen, missed = 0, [], 0
    for count in (1, 0, 3, 6, 2):
        if count:
            recording._feed(rank.batch(*(rank.call() for _ in range(count))))
        rows, place, lost = recording.follow("call", place)
        seen += rows["call"].tolist()
        missed += lost

    assert seen == [1, 2, 3, 4, 7, 8, 9, 10, 11, 12]
    assert missed == 2
    assert recording.rows("call", since=10)["call"].tolist() == [11, 12]


def test_the_values_of_a_call():
    recording = two_ranks()

    assert there(recording._preview(1, 1, 1)).first.tolist() == [2]
    assert there(recording._preview(0, 2, 0)).first.tolist() == [7]
    assert recording._preview(0, 2, 1) is None
    assert recording._preview(0, 99, 0) is None


def test_values_that_are_not_kept_any_more():
    recording, rank = Recording(1, capacity={"value": 2}), Rank(0)
    calls = []
    for number in range(1, 5):
        recording._feed(rank.batch(rank.call(), rank.values(number, 0, [number])))
        calls.append(recording.collectives())

    assert [one.input and one.input.first.tolist() for one in recording.collectives()] == [None, None, [3], [4]]
    assert recording._preview(0, 2, 0) is None
    assert there(recording._preview(0, 3, 0)).first.tolist() == [3]
    assert calls[0][0].input is None


def test_whole_tensors_in_bounded_memory(monkeypatch):
    monkeypatch.setattr(store, "TENSOR_BYTES", 100)
    recording, rank = Recording(1), Rank(0)
    for number in range(1, 5):
        data = np.full(6, number, "<f4").tobytes()
        two = tuple(Tensor(call=number, side=1, dtype="float32", shape=(2, 3), data=data) for _ in range(2))
        recording._feed(rank.batch(tensors=two))
    recording._feed(rank.batch(tensors=(Tensor(call=5, side=1, dtype="float32", shape=(99,), data=b"\0" * 396),)))

    assert recording.tensor(0, 2, 1) == []
    assert [one.tolist() for one in recording.tensor(0, 4, 1)] == [[[4] * 3] * 2] * 2
    assert recording.tensor(0, 5, 1) == []
    assert recording.store.nbytes >= 96


def test_tensors_of_other_types():
    recording, rank = Recording(1), Rank(0)
    half = (np.array([1.5, -2], "<f4").view("<u4") >> 16).astype("<u2").tobytes()
    tensors = (
        Tensor(call=1, side=0, dtype="bfloat16", shape=(1, 2), data=half),
        Tensor(call=1, side=0, dtype="bool", shape=(), data=b"\1"),
        Tensor(call=1, side=0, dtype="float8_e4m3fn", shape=(2,), data=b"\1\2"),
        Tensor(call=1, side=0, dtype="int64", shape=(0, 4), data=b""),
        Tensor(call=1, side=0, dtype="unheard of", shape=(3,), data=b"\1\2"),
    )
    recording._feed(rank.batch(tensors=tensors))

    found = recording.tensor(0, 1, 0)
    assert [one.tolist() for one in found] == [[[1.5, -2]], True, [1, 2], [], [1, 2]]
    assert found[3].shape == (0, 4)


def test_gradients_before_and_after():
    recording = Recording(2)
    for number in (0, 1):
        rank = Rank(number)
        local, synchronised = SIDES.index("local gradient"), SIDES.index("synchronised gradient")
        for span in (3, 4):
            place = {"span": span, "kind": SPANS.index("backward"), "cell": 2, "step": span - 3}
            recording._feed(
                rank.batch(
                    rank.values(span, local, [number + 1.0], name="net.weight"),
                    rank.values(span, synchronised, [1.5], name="net.weight"),
                    rank.values(span, 1, [9.0]),  # of a call
                    *([rank.row("span", **place)] if span == 3 else []),
                )
            )
    found = recording.gradients("net.weight")

    assert [(one.rank, one.backward, one.cell, one.step) for one in found] == [
        (0, 3, 2, 0),
        (0, 4, None, None),
        (1, 3, 2, 0),
        (1, 4, None, None),
    ]
    assert [there(one.local).first.tolist() for one in found] == [[1], [1], [2], [2]]
    assert [there(one.synchronised).first.tolist() for one in found] == [[1.5]] * 4
    assert len(recording.gradients()) == 4
    assert recording.gradients("other") == []


def test_layouts():
    run, recording = simulate(world_size=2, steps=2, buckets=2), Recording(2)
    for batch in run.batches():
        recording._feed(batch)
    first, rebuilt = (one for one in recording.layouts if one.rank == 0)

    assert first.model == rebuilt.model == "DistributedDataParallel(Net)"
    assert [one.parameters for one in rebuilt.buckets] == [("layers.1.weight",), ("layers.0.weight",)]
    assert [one.nbytes for one in first.buckets] == [2 << 20]
    assert (first.is_rebuilt, rebuilt.is_rebuilt) == (False, True)


def test_a_process_that_takes_a_ranks_place_counts_on():
    recording, before, after = Recording(1), Rank(0, stream=11), Rank(0, stream=12)
    before.text("shifts the numbers of texts")
    for rank, value in ((before, 1.0), (after, 2.0)):
        span = rank.row("span", span=1, kind=SPANS.index("backward"), name="Net")
        whole = Tensor(call=1, side=0, dtype="float32", shape=(1,), data=np.float32(value).tobytes())
        call = rank.call("all_reduce", backward=1)
        recording._feed(rank.batch(call, rank.values(1, 0, [value]), span, tensors=(whole,)))
    first, second = recording.collectives()

    assert (first.op, second.op) == ("all_reduce", "all_reduce")
    assert (first.call, second.call) == (1, 1_000_001)
    assert (there(first.input).mean, there(second.input).mean) == (1, 2)
    assert recording.rows("call")["backward"].tolist() == recording.rows("span")["span"].tolist() == [1, 1_000_001]
    assert [recording.tensor(0, one.call, 0)[0].tolist() for one in (first, second)] == [[1], [2]]


def test_what_was_dropped_is_counted():
    recording = two_ranks()
    recording._feed(Rank(1).batch(dropped=3))
    recording._feed(Rank(1).batch(dropped=4))

    assert recording.dropped == {1: 7}
    assert repr(recording) == "<Recording of 2 ranks: 6 calls, 0 spans, 0 values of metrics, 7 rows lost>"
    assert repr(Recording(1)) == "<Recording of 1 rank: 0 calls, 0 spans, 0 values of metrics>"


def test_a_new_name_in_each_step_does_not_fill_the_memory(monkeypatch):
    from ddp_notebook.observe.tables import text_table

    monkeypatch.setattr(text_table, "_MOST_BYTES", 1000)
    recording, rank = Recording(1), Rank(0)
    for step in range(500):
        recording._feed(rank.batch(rank.row("metric", name=f"loss of step {step}", value=step)))

    assert len(recording.store.texts) < 100
    assert next(iter(recording.metrics)) == "loss of step 0"
    assert list(recording.metrics)[-1] == "(too many different texts)"


def test_memory_is_flat_once_it_is_full():
    recording, rank = Recording(1, capacity=dict.fromkeys(store.CAPACITY, 100)), Rank(0)
    sizes = []
    for _ in range(30):
        recording._feed(rank.batch(*(rank.call() for _ in range(20)), *(rank.values(1, 0, [1.0]) for _ in range(40))))
        sizes.append(recording.store.nbytes)

    assert len(set(sizes[6:])) == 1
    assert len(recording.rows("call")) == len(recording.rows("value")) == 100


def test_codes_that_are_not_known_here_are_numbers():
    recording, rank = Recording(1), Rank(0)
    recording._feed(rank.batch(rank.call(origin=200, state=99)))
    one = recording.collectives()[0]

    assert (one.origin, one.state) == ("200", "99")


def test_the_same_rows_come_out_as_went_in():
    run, recording = simulate(world_size=3, steps=4), Recording(3)
    for batch in run.batches():
        recording._feed(batch)
    for table, columns in (("call", ("op", "group", "site")), ("span", ("name",))):
        ours, theirs = recording.rows(table), run.rows(table)
        theirs = theirs[np.argsort(theirs["rank"], kind="stable")]
        assert len(ours) == len(theirs)
        for column in there(ours.dtype.names):
            if column in columns:
                words = [recording.text(number) for number in ours[column].tolist()]
                assert words == [run.text(number) for number in theirs[column].tolist()]
    assert ours["start_ns"].tolist() == theirs["start_ns"].tolist()


def test_a_cell_that_was_set_aside_is_told_of_no_more(tmp_path):
    run, recording = simulate(world_size=2, steps=12), Recording(2)
    for batch in run.batches():
        recording._feed(batch)
    assert recording.steps() and len(recording.collectives())
    (cell,) = {step.cell for step in recording.steps()}
    recording._set_aside(cell)
    for one in (recording, load(recording.save(tmp_path / "run.npz"))):
        assert one.steps() == [] and one.straggler() is None and len(one.collectives()) == 0
        assert one.report().steps == 0


@pytest.mark.slow
def test_every_picture_can_be_asked_of_a_recording(tmp_path):
    run, recording = simulate(world_size=2, steps=12), Recording(2)
    for batch in run.batches():
        recording._feed(batch)
    for plot in (recording.plot.steps, recording.plot.buckets, recording.plot.bandwidth):
        assert plot().get_suptitle(), plot
    with pytest.raises(UsageError, match="log"):
        recording.plot.loss()
    trace = recording.save_trace(tmp_path / "run.json")
    assert json.loads(trace.read_text())["traceEvents"]


def test_without_pandas_its_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)

    with pytest.raises(MissingPackageError, match=r"^to_pandas\(\) needs pandas, .* installed: %pip install pandas$"):
        two_ranks().collectives().to_pandas()
    with pytest.raises(ImportError):
        two_ranks().to_pandas("span")


@pytest.mark.slow
def test_a_table_for_pandas():
    pytest.importorskip("pandas")
    recording = two_ranks()
    calls = recording.collectives(rank=1).to_pandas()

    assert calls["op"].tolist() == ["all_reduce", "send", "all_reduce"]
    assert calls["group"].tolist() == ["default", "default", "rows"]
    assert calls["group_name"].tolist() == ["0", "0", "pair"]
    assert calls["reduce_op"].tolist() == ["SUM", "", ""]
    assert calls["origin"][0] == "ddp"
    values = recording.to_pandas("value")
    assert values["side"].tolist()[:2] == ["input", "output"]
    assert values["first"][0].tolist() == [1, 3]
    assert all(len(recording.to_pandas(table)) == len(recording.rows(table)) for table in recording.store.rings)


@pytest.mark.slow
def test_a_long_curve_keeps_its_start_and_its_extremes(tmp_path):
    recording = Recording(2, capacity={"metric": 1024})
    recording.store.earlier = Earlier(METRIC, most=1000)
    steps = 20_000
    values = 10 * np.exp(-np.arange(steps) / 4000)
    values[777], values[888], values[999] = 1000, -5, np.nan
    for first in range(0, steps, 20):
        for rank in (0, 1):
            rows = np.zeros(20, METRIC)
            rows["rank"], rows["name"], rows["cell"] = rank, 1, 1
            rows["step"] = rows["time_ns"] = np.arange(first, first + 20)
            rows["value"] = values[first : first + 20] + rank
            recording._feed(Batch(rank=rank, stream=rank, texts={1: "loss"}, tables={"metric": rows}))
    recording.save(tmp_path / "run.npz")
    for one in (recording, load(tmp_path / "run.npz")):
        metric = one.metrics["loss"]
        assert 1024 < len(metric.steps) <= 2024 + 40
        for rank in (0, 1):
            mine = metric.ranks == rank
            kept, of_steps = metric.values[mine], metric.steps[mine]
            assert of_steps[0] == 0 and of_steps[-1] == steps - 1 and (np.diff(of_steps) > 0).all()
            assert np.nanmax(kept) == 1000 + rank and np.nanmin(kept) == -5 + rank and np.isnan(kept).sum() == 1
            assert np.array_equal(kept, (values + rank)[of_steps], equal_nan=True)
            assert np.diff(of_steps).max() < steps / 20, "no part of the curve is missing"


def test_earlier_metrics_stay_on_the_earlier_clock_of_their_rank():
    recording = Recording(1, capacity={"metric": 8})
    recording.store.earlier = Earlier(METRIC, most=16)
    recording.clock.add(0, sent_ns=10**6, rank_ns=10, received_ns=10**6 + 2)
    for first in range(0, 40, 4):
        if first == 20:
            recording._part_from_clock(0)
        rows = np.zeros(4, METRIC)
        rows["name"], rows["cell"], rows["step"] = 1, 1, np.arange(first, first + 4)
        rows["time_ns"] = 100 * rows["step"]
        recording._feed(Batch(rank=0, stream=0, texts={1: "loss"}, tables={"metric": rows}))
    rows = recording.rows("metric")
    assert len(rows) > 8 and rows["step"][0] == 0
    shift = rows["time_ns"] - 100 * rows["step"]
    assert (shift[rows["step"] < 20] == shift[0]).all() and shift[0] != 0 and (shift[rows["step"] >= 20] == 0).all()
