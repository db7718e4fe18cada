"""Simulated ranks: their recording, and that it grows as time passes."""

from __future__ import annotations

import time

import numpy as np
import pytest

from ddp_notebook.errors import UsageError
from ddp_notebook.observe.tables import matching
from ddp_notebook.records.schema import TABLES
from ddp_notebook.widgets.simulated.simulation import simulate
from tests.conftest import wait_until
from tests.observe.batches import there


@pytest.fixture(scope="module")
def recording():
    return simulate(world_size=8)


def test_the_report_says_what_was_simulated(recording):
    first, second = recording.report(cell=1), recording.report(cell=2)

    assert (first.steps, second.steps, len(second.ranks)) == (58, 58, 8)
    assert 35e6 < first.overall.step_ns < 45e6 < second.overall.step_ns
    assert first.straggler is None
    assert second.straggler.rank == 2 and second.straggler.phase == "forward"
    assert second.straggler.factor == pytest.approx(1.8, rel=0.05)
    assert 0.05 < first.overall.share(first.overall.exposed_ns) < 0.2
    assert second.verdict == "18 % of the step waits for rank 2, whose forward takes 1.8 times the others'"


def test_all_steps_have_six_buckets_whose_parameters_have_names(recording):
    steps = recording.steps()

    assert {(step.cell, step.step) for step in steps} == {(cell, step) for cell in (1, 2) for step in range(60)}
    assert {len(step.buckets) for step in steps} == {6}
    assert steps[0].buckets[0].parameters[-1] == "blocks.5.attention.qkv.weight"
    assert len({name for bucket in steps[0].buckets for name in bucket.parameters}) == 40
    for step in steps:
        parts = step.input_ns + step.compute_ns + step.optimizer_ns + step.exposed_ns + step.waiting_ns + step.rest_ns
        assert parts == pytest.approx(step.duration_ns, abs=10)


def test_the_loss_falls_on_every_rank_over_both_cells(recording):
    loss = recording.metrics["loss"]

    for rank in range(8):
        steps, values = loss.of_rank(rank)
        assert steps.tolist() == list(range(120))
        assert values[:5].mean() > 2 and values[-5:].mean() < 0.15
    assert list(recording.metrics) == ["loss", "accuracy"]


@pytest.mark.slow
def test_collectives_are_matched_and_their_sums_are_sums(recording):
    calls = recording.rows("call")

    assert len(matching.match_collectives(recording, calls)) == 120 * 6 + 12
    assert len(matching.match_messages(recording, calls)) == 4 * 8
    for op, line in (("all_reduce", "cell line 12"), ("all_reduce", "")):
        same = [one for one in recording.collectives(op=op) if one.site == line]
        found = [one for one in same if one.number == same[-1].number]
        assert [one.rank for one in found] == list(range(8))
        total = np.sum([one.input.first for one in found], axis=0)
        for one in found:
            np.testing.assert_allclose(one.output.first, total, rtol=1e-5, atol=1e-7)
            assert one.input.low <= one.input.first.min() and one.output.high >= one.output.first.max()
    sent = {one.peer: one.input.first for one in list(recording.collectives(op="send"))[-8:]}
    for one in list(recording.collectives(op="recv"))[-8:]:
        np.testing.assert_array_equal(one.output.first, sent[one.rank])


def test_rows_come_in_the_order_of_time_with_counts_that_grow(recording):
    for table, column in (("call", "issue_ns"), ("span", "start_ns"), ("metric", "time_ns")):
        rows = recording.rows(table)
        rows = rows[rows["kind"] > 0] if table == "span" else rows
        assert np.all(rows[column] > np.maximum.accumulate(rows[column]) - 500_000_000), "at most a batch behind"
    for rank in range(8):
        calls = recording.rows("call")
        calls = calls[calls["rank"] == rank]
        assert calls["call"].tolist() == list(range(1, len(calls) + 1))
        collectives = calls[calls["peer"] < 0]
        assert collectives["number"].tolist() == list(range(1, len(collectives) + 1))
        assert np.all(calls["end_ns"] >= calls["issue_ns"])


def test_the_same_seed_gives_the_same_and_another_one_does_not():
    one, two, other = simulate(4, steps=10, seed=3), simulate(4, steps=10, seed=3), simulate(4, steps=10, seed=4)

    for table in TABLES:
        assert one.rows(table).tobytes() == two.rows(table).tobytes(), table
    assert one.rows("metric").tobytes() != other.rows("metric").tobytes()


def test_a_gradient_that_is_no_number_spreads():
    recording = simulate(4, steps=20, nan_at=(1, 7))

    buckets = [one for one in recording.collectives(op="all_reduce", cell=1) if one.bucket == 0]
    of_step = {(one.rank, one.step): one for one in buckets}
    assert [there(of_step[rank, 7].input).nans > 0 for rank in range(4)] == [False, True, False, False]
    assert all(there(of_step[rank, 7].output).nans > 0 for rank in range(4))
    loss = recording.metrics["loss"]
    assert np.isfinite(loss.values[loss.steps <= 7]).all() and np.isnan(loss.values[loss.steps > 7]).all()


def test_one_rank_and_one_step_are_enough():
    assert simulate(1, steps=3).report().overall is not None
    assert len(simulate(2, steps=1).steps()) == 2
    assert simulate(2, steps=12, straggler=5).straggler() is None, "there is no rank 5"
    assert len(simulate(2, steps=4, values=False).rows("value")) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"world_size": 0}, r"^world_size must be greater than 0, got 0"),
        ({"steps": -1}, "^steps must be greater than 0, got -1"),
    ],
)
def test_nothing_cannot_be_simulated(arguments, words):
    with pytest.raises(UsageError, match=words):
        simulate(**arguments)


@pytest.mark.long
def test_64_ranks_for_500_steps_take_seconds():
    began = time.process_time()
    recording = simulate(world_size=64, steps=500)

    assert time.process_time() - began < 15, "2.5 s were measured"
    assert not recording.dropped and len(recording.rows("metric")) == 64 * 500 * 2


def test_live_ranks_go_on_as_time_passes_until_they_are_stopped():
    simulation = simulate(world_size=4, live=True, rate=50)
    try:
        assert repr(simulation) == "<Simulation of 4 ranks, running>"
        ring = simulation.recording.store.rings["metric"]
        wait_until(lambda: len(ring) > 4 * 2 * 10)
        newest_ns = int(simulation.recording.rows("metric")["time_ns"].max())
        assert abs(time.monotonic_ns() - newest_ns) < 1e9, "on the clock of the notebook"
    finally:
        simulation.stop()
    assert repr(simulation) == "<Simulation of 4 ranks, stopped>" and not simulation.is_running
    assert {len(simulation.recording.metrics["loss"].of_rank(rank)[0]) for rank in range(4)} == {len(ring) // 8}


@pytest.mark.slow
def test_live_ranks_with_a_last_step_end_by_themselves():
    with simulate(world_size=2, steps=20, live=True, rate=200) as simulation:
        wait_until(lambda: not simulation.is_running, timeout_s=20)

    assert {(step.cell, step.step) for step in simulation.recording.steps()} == {
        (cell, step) for cell in (1, 2) for step in range(10)
    }
