"""Forecasts from recorded rows: the model repeats the run, and predicts runs on other numbers of ranks."""

from __future__ import annotations

import re
import time
from typing import Any

import numpy as np
import pytest

from ddp_notebook.errors import UsageError
from ddp_notebook.observe.files import load
from ddp_notebook.observe.forecast.forecast import forecast
from ddp_notebook.observe.forecast.network import Link, Network, Transfer, fit
from ddp_notebook.observe.recording import Recording
from ddp_notebook.observe.steps.run import run_of
from ddp_notebook.records.units import ms
from ddp_notebook.widgets import simulate as simulate_widgets
from tests.observe.synthetic import BEGIN_NS, MS, Synthetic, simulate

MB = 1_000_000


def ring_ms(ranks: int, nbytes: int, gb_s: float, latency_us: float = 0.0) -> float:
    """Return the time of an all_reduce in a ring."""
    return 2 * (ranks - 1) * latency_us / 1e3 + 2 * (ranks - 1) / ranks * nbytes / gb_s / 1e6


def one_of(run: Synthetic, ranks: int, **changes: Any) -> Any:
    """Return the prediction of a number of ranks."""
    (found,) = forecast(run, [ranks], **changes).predictions
    return found


def step_ms(run: Synthetic, ranks: int, **changes: Any) -> float:
    return one_of(run, ranks, **changes).step_ns / MS


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"transfer_ms": 12, "world_size": 2},
        {"slow": 2, "phase": "forward", "extra_ms": 50},
        {"slow": 1, "phase": "between", "extra_ms": 30, "noise_ms": 3},
        {"slow": 0, "phase": "backward", "extra_ms": 20, "transfer_ms": 9},
        {"is_ddp": False, "transfer_ms": 5},
        {"micro_steps": 3, "transfer_ms": 9},
        {"micro_steps": 3, "synchronised": 3, "transfer_ms": 9, "noise_ms": 1},
    ],
)
def test_the_recorded_run_is_predicted(shape):
    found = forecast(simulate(steps=30, **shape), [4])
    assert abs(found.error) < 0.01 and found.measured is not None
    assert found.measured_ns / MS == pytest.approx(found.measured.step_ns / MS)


def test_the_mean_of_the_report_is_named():
    even = forecast(simulate(steps=30, world_size=2), [4])
    assert "the mean of %ddp_report" not in str(even)
    # The forecast takes 40 of 200 steps, and the report leaves out the shortest and the longest ones.
    run = simulate(steps=200, world_size=2, noise_ms=8, seed=1)
    found = forecast(run, [4])
    report = run_of(run, 1)
    assert report is not None and found.report_ns == report.step_ns and ms(report.step_ns) != ms(found.measured_ns)
    (line,) = [one for one in str(found).splitlines() if one.startswith("For ")]
    assert f"(mean of 40 steps; the mean of %ddp_report has other steps: {ms(report.step_ns)})" in line


@pytest.mark.parametrize(("busy", "ready"), [(3.9, 0.3), (3.9, 0.01), (1.9, 0.3)])
def test_a_run_on_a_busy_machine_gets_a_note(busy, ready):
    run = simulate(steps=30, world_size=2)
    for rank in (0, 1):
        for second in (-1, 3):
            counted = {"ready_ns": ready, "ran_ns": 0.9, "host_busy_ns": busy}
            row = {name: int(1e10 + second * 1e9 * share) for name, share in counted.items()}
            at_ns = BEGIN_NS + second * 10**9
            run.add("resource", rank=rank, time_ns=at_ns, cores=4, host_cores=4, gpu_allocated_bytes=-1, **row)
    text = str(forecast(run, [4]))
    assert ("Other processes used the cores: rank 0 had no free core for up to 40.0 ms of a step" in text) == (
        busy > 3 and ready > 0.1
    )


@pytest.mark.parametrize("ranks", [4, 8, 32])
@pytest.mark.parametrize("transfer_from", [0.05, 0.5])
def test_other_numbers_of_ranks_are_predicted(ranks, transfer_from):
    rate = transfer_from  # GB/s

    def run(count: int) -> Synthetic:
        return simulate(world_size=count, steps=14, bucket_nbytes=MB, transfer_ms=ring_ms(count, MB, rate))

    truth = run(ranks)
    expected = forecast(truth, [ranks]).measured_ns / MS
    assert step_ms(run(2), ranks) == pytest.approx(expected, rel=0.02)
    assert step_ms(truth, 2) == pytest.approx(forecast(run(2), [2]).measured_ns / MS, rel=0.02)


def test_a_single_rank_takes_its_own_time():
    run = simulate(steps=20, slow=2, phase="forward", extra_ms=40, transfer_ms=9)
    assert step_ms(run, 1) == pytest.approx(33.5 + 10, rel=0.01), "the mean of all ranks: one of four takes 40 ms more"


def test_given_networks_replace_the_fitted_one():
    run = simulate(steps=20, world_size=2, transfer_ms=15)
    fast, slow = step_ms(run, 8, network=1000), step_ms(run, 8, network=0.01)
    assert fast == pytest.approx(33.5, abs=0.1)
    # the buckets follow each other from the first one on, which is ready after a quarter of the backward
    assert slow == pytest.approx(1 + 0.5 + 10 + 5 + 4 * ring_ms(8, 1 << 20, 0.01) + 2, rel=0.01)
    within = step_ms(run, 8, network=[1000, 0.01], gpus_per_node=8)
    assert within == pytest.approx(fast), "one node"
    assert step_ms(run, 16, network=[1000, 0.01], gpus_per_node=8) > within
    assert step_ms(run, 8, network=1000, latency_us=1000) > fast + 1


def test_larger_batches_and_more_micro_steps():
    run = simulate(steps=20, world_size=2, transfer_ms=15, samples=32)
    usual = one_of(run, 4, network=1000)
    larger = one_of(run, 4, network=1000, batch=2)
    assert larger.step_ns / MS == pytest.approx(2 * 31 + 2.5, abs=0.2)
    assert larger.samples_per_s / usual.samples_per_s == pytest.approx(2 * usual.step_ns / larger.step_ns)
    more = one_of(run, 4, network=1000, micro_steps=3)
    assert more.step_ns / MS == pytest.approx(3 * 31 + 2.5, abs=0.2)
    assert more.samples_per_s / usual.samples_per_s == pytest.approx(3 * usual.step_ns / more.step_ns)
    back = forecast(simulate(steps=20, world_size=2, micro_steps=3), [4], network=1000, micro_steps=1).predictions
    assert back[0].step_ns / MS == pytest.approx(31 + 3 * 0.5 + 2, abs=0.2)
    with pytest.raises(UsageError, match="all 3 backward passes of a recorded step synchronise"):
        forecast(simulate(steps=20, micro_steps=3, synchronised=3), [4], micro_steps=1)


def test_other_buckets_are_predicted():
    run = simulate(steps=20, world_size=2, transfer_ms=15)  # 4 buckets of 1 MiB in 20 ms
    other = {1: [5, 10, 15, 20], 2: [10, 20], 4: [20], 100: [20]}
    network = forecast(run, [2]).network
    assert network is not None
    transfer = ring_ms(2, 1 << 20, network.inside.gb_s)
    for mebibytes, ready in other.items():
        end = 0.0
        for at in ready:
            end = max(end, at) + transfer * 4 / len(ready)
        assert step_ms(run, 2, bucket_mb=mebibytes) == pytest.approx(11.5 + end + 2, rel=0.01), mebibytes
    halves = step_ms(run, 2, bucket_mb=0.5)
    assert halves == pytest.approx(11.5 + 2.5 + 4 * transfer + 2, rel=0.01), "the first half is ready after 2.5 ms"


def test_a_run_that_the_model_does_not_explain_gets_no_forecast():
    run = simulate(steps=20, world_size=2, transfer_ms=2)
    for row in run._rows["call"]:
        if row["step"] % 2:
            row["end_ns"] += 60 * MS  # half of the transfers take 60 ms longer than the fit explains
    run._tables.clear()
    found = forecast(run, [8, 64])
    assert found.predictions == () and abs(found.error) > 0.1
    text = str(found)
    assert text.startswith(
        "No forecast, because the forecast of the recorded run is wrong by more than 10 %. For cell 1 itself on 2 "
        "ranks, the forecast is "
    )
    assert re.search(r"% (more|less) than the measured [\d.]+ ms \(mean of 16 steps\)\. The cause is not known\.", text)
    assert len(str(found).splitlines()) == 1
    with pytest.raises(UsageError, match="nothing to draw: No forecast"):
        found.plot()


def test_the_text_has_a_sentence_a_table_and_the_limits():
    lines = str(forecast(simulate(steps=20), [8, 64])).splitlines()
    assert lines[0] == "A step takes 34.7 ms on 8 ranks (efficiency 97 %), and 34.8 ms on 64 ranks (efficiency 96 %)."
    assert lines[2].split() == ["ranks", "step", "ms", "exposed", "ms", "samples/s", "efficiency"]
    assert lines[3].split() == ["4", "measured", "34.5", "1.0", "3,710", "97", "%"]
    assert lines[-1].startswith(
        "Left out: more ranks that share processors, memory or disks, input that loads slower, "
    )
    assert "latency of a message: unknown, counted as 0" in "\n".join(lines), "all buckets have one size"


def test_when_more_ranks_do_not_pay():
    run = simulate(steps=20, world_size=2, transfer_ms=2)
    assert "More ranks pay up to 65,536: each doubling" in str(forecast(run, [8]))
    slow = str(forecast(run, [8], latency_us=300))
    assert "From 8 ranks on more do not pay: doubling them adds less than half of the ideal gain" in slow


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"ranks": []}, "ranks must contain at least one"),
        ({"ranks": [0]}, "ranks must be integers from 1 to 1,048,576, got 0"),
        ({"network": [1, 2]}, "network with a value between nodes needs gpus_per_node"),
        ({"network": [1, 2, 3]}, "network must be one value or two"),
        ({"network": -1}, "network must be a positive number of GB/s, got -1"),
        ({"batch": 0}, "batch must be a positive number, got 0"),
        ({"gpus_per_node": 0}, "gpus_per_node must be a positive integer, got 0"),
        ({"cell": 7}, "no optimizer step was recorded in cell 7"),
    ],
)
def test_wrong_values_are_named(changes, sentence):
    with pytest.raises(UsageError, match=sentence):
        forecast(simulate(steps=10), **{"ranks": [8], **changes})


def test_other_training_gets_no_forecast():
    with pytest.raises(UsageError, match="has 3 comparable steps after the first two"):
        forecast(simulate(steps=7), [8])
    with pytest.raises(UsageError, match="hold parts of a model"):
        forecast(simulate(steps=20, is_ddp=False, origin="fsdp"), [8])
    with pytest.raises(UsageError, match="no all_reduce of all 4 ranks"):
        forecast(simulate(steps=20, is_ddp=False, has_calls=False), [8])
    alone = simulate(steps=20, world_size=1)
    with pytest.raises(UsageError, match="ran on one rank, so no network was measured"):
        forecast(alone, [8])
    assert step_ms(alone, 8, network=1000) > 0


# ---- the network


def test_costs_are_those_of_the_algorithms():
    link = Link(latency_ns=1000, ns_per_byte=0.5)
    flat = Network(inside=link, between=link, per_node=None, has_trees=False)
    assert flat.cost_ns("all_reduce", 8, 1000) == 2 * 7 * 1000 + 2 * 7 / 8 * 500
    assert flat.cost_ns("all_gather", 4, 1000) == 3 * 1000 + 3 / 4 * 4 * 500, "each rank has 1,000 bytes of the whole"
    assert flat.cost_ns("reduce_scatter", 4, 1000) == 3 * 1000 + 3 / 4 * 500
    assert flat.cost_ns("broadcast", 8, 1000) == 3 * (1000 + 500)
    assert flat.cost_ns("barrier", 5, 0) == 2 * 4 * 1000
    trees = Network(inside=link, between=link, per_node=None, has_trees=True)
    assert trees.cost_ns("all_reduce", 64, 1000) == 2 * 6 * 1000 + 2 * 500, "a tree has fewer messages"
    assert trees.cost_ns("all_reduce", 64, 10**9) == flat.cost_ns("all_reduce", 64, 10**9), "a ring sends less"


def test_two_levels_use_the_links_of_all_ranks_of_a_node():
    nodes = Network(
        inside=Link(latency_ns=0, ns_per_byte=0.01),
        between=Link(latency_ns=0, ns_per_byte=1.0),
        per_node=8,
        has_trees=False,
    )
    assert nodes.cost_ns("all_reduce", 8, 8000) == pytest.approx(2 * 7 / 8 * 80)
    assert nodes.cost_ns("all_reduce", 32, 8000) == pytest.approx(2 * 7 / 8 * 80 + 2 * 3 / 4 * 1000)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_rate_and_latency_are_found(ranks):
    random = np.random.default_rng(ranks)
    transfers = [
        Transfer(n, nbytes, ring_ms(ranks, nbytes, 2.0, 50 * n) * 1e6 * random.normal(1, 0.02))
        for n, nbytes in ((1, 4), (1, 4 * MB), (3, 60 * MB), (1, MB))
        for _ in range(20)
    ]
    found = fit(transfers, ranks)
    assert found is not None and found.has_latency and found.count == 20 * 6
    assert found.link.gb_s == pytest.approx(2.0, rel=0.05)
    assert found.link.latency_ns == pytest.approx(50_000, rel=0.25)


def test_similar_sizes_have_no_latency():
    found = fit([Transfer(1, n, ring_ms(2, n, 1.0, 100) * 1e6) for n in (MB, 2 * MB)], 2)
    assert found is not None and not found.has_latency and found.link.latency_ns == 0
    assert fit([], 2) is None and fit([Transfer(1, MB, 1e6)], 1) is None


# ---- figure, files and duration


def test_the_figure_has_predictions_and_the_measured_step():
    found = forecast(simulate(steps=20, world_size=2, transfer_ms=12), [4, 8])
    axes: Any = found.plot().axes
    left, right = axes
    assert [label.get_text() for label in left.get_xticklabels()] == ["2", "4", "8"]
    (dot,) = left.lines
    assert dot.get_xydata().tolist() == [[0, pytest.approx(found.measured_ns / 1e6)]]
    heights = [bar.get_height() for bar in left.patches]
    assert np.reshape(heights, (2, 2)).sum(axis=0) == pytest.approx([one.step_ns / 1e6 for one in found.predictions])
    rates = [line.get_ydata() for line in right.lines if len(line.get_ydata()) == 2]
    assert rates[-1] == pytest.approx([one.samples_per_s for one in found.predictions])


def test_a_saved_recording_gives_the_same(tmp_path):
    recording = Recording(2)
    for batch in simulate(steps=20, world_size=2, transfer_ms=5).batches():
        recording._feed(batch)
    before = recording.forecast([8, 64])
    assert load(recording.save(tmp_path / "run.npz")).forecast([8, 64]) == before
    assert repr(before).startswith("Forecast(A step takes ")


@pytest.mark.long
def test_many_ranks_and_steps_take_a_second(tmp_path):
    path = simulate_widgets(64, steps=1000, values=False).save(tmp_path / "run.npz")
    begin = time.process_time()
    found = load(path).forecast([8, 64, 512])
    assert found.predictions and time.process_time() - begin < 1.0
