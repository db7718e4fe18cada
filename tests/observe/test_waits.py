"""Waits between ranks, and detection of the slow rank."""

from __future__ import annotations

import re
import time

import numpy as np
import pytest

from ddp_notebook.observe.recording import Recording
from ddp_notebook.observe.report.report import report
from ddp_notebook.observe.steps.waits import straggler, waits
from ddp_notebook.observe.tables.matching import _packed, match_messages
from ddp_notebook.records.schema import CALL
from tests.observe.synthetic import BEGIN_NS, MS, Synthetic, simulate

PHASES = ("input", "forward", "backward", "optimizer", "between")


def three_arrivals(**more) -> Synthetic:
    """Let ranks arrive at one all-reduce at 0, 4 and 10 ms; it finishes at 13 ms."""
    run = Synthetic(3)
    for rank, at in enumerate((0, 4, 10)):
        run.call(rank, "all_reduce", BEGIN_NS + at * MS, BEGIN_NS + 13 * MS, nbytes=4000, **more)
    return run


# ---- waiting and transfer


def test_a_rank_waits_from_its_arrival_until_the_last_arrival():
    (wait,) = waits(three_arrivals())

    assert (wait.waited_ns / MS).tolist() == [10, 6, 0]
    assert wait.transfer_ns == 3 * MS
    assert (wait.op, wait.group, wait.number, wait.nbytes, wait.ranks, wait.last) == (
        ("all_reduce", "default", 1, 4000, (0, 1, 2), 2)
    )
    assert wait.spread_ns == 10 * MS


def test_nobody_waits_longer_than_its_own_call_lasts():
    """The source of a broadcast continues before the last rank has arrived."""
    run = Synthetic(2)
    run.call(0, "broadcast", BEGIN_NS, BEGIN_NS + 2 * MS)
    run.call(1, "broadcast", BEGIN_NS + 50 * MS, BEGIN_NS + 51 * MS)

    (wait,) = waits(run)

    assert wait.waited_ns.tolist() == [2 * MS, 0]
    assert wait.transfer_ns == 1 * MS


def test_a_difference_within_the_errors_of_two_clocks_is_none():
    run = three_arrivals()
    run.clock_errors_ns = [1 * MS, 4 * MS, 2 * MS]

    (wait,) = waits(run)

    assert (wait.waited_ns / MS).tolist() == [10, 0, 0]


def test_a_gpu_arrives_when_its_device_does():
    run = Synthetic(2)
    for rank in (0, 1):
        run.call(rank, "all_reduce", BEGIN_NS, BEGIN_NS + 9 * MS, start_ns=BEGIN_NS + (2, 7)[rank] * MS)

    (wait,) = waits(run)

    assert (wait.waited_ns / MS).tolist() == [5, 0]


def test_a_collective_that_one_rank_alone_has_come_to_is_no_wait():
    run = three_arrivals()
    run.call(0, "barrier", BEGIN_NS + 20 * MS, -1)

    assert len(waits(run)) == 1


def test_an_end_that_is_not_known_makes_no_transfer():
    run = Synthetic(2)
    for rank in (0, 1):
        run.call(rank, "all_reduce", BEGIN_NS + rank * MS, -1)

    (wait,) = waits(run)

    assert (wait.waited_ns.tolist(), wait.transfer_ns) == ([MS, 0], 0)


def test_collectives_match_by_group_and_number_in_any_row_order():
    run = Synthetic(4)
    for pair in ((2, 3), (0, 1)):
        for number in range(3):
            for rank in pair:
                at = BEGIN_NS + number * 10 * MS + rank * MS
                run.call(rank, "all_reduce", at, at + 5 * MS, group=f"pair {pair[0]}", ranks=pair)
    rows = run.rows("call")
    run._tables["call"] = np.random.default_rng(0).permutation(rows)

    found = waits(run)

    assert [(one.group, one.number, one.last) for one in found] == [
        (f"pair {first}", number, first + 1) for number in (1, 2, 3) for first in (0, 2)
    ]
    assert [one.number for one in waits(run, group="pair 2")] == [1, 2, 3]
    assert waits(run, group="no such group") == []


def test_numbers_that_begin_anew_belong_to_their_cell():
    run = simulate(steps=3, is_ddp=False)
    run._counts.clear()
    run = simulate(steps=3, is_ddp=False, cell=2, into=run)

    assert [(one.cell, one.number, len(one.ranks)) for one in waits(run)] == [
        (cell, number, 4) for cell in (1, 2) for number in (1, 2, 3)
    ]
    assert [one.cell for one in waits(run, cell=2)] == [2, 2, 2]


def test_different_operations_under_one_number_do_not_match():
    run = Synthetic(2)
    run.call(0, "all_reduce", BEGIN_NS, -1)
    run.call(1, "broadcast", BEGIN_NS, -1)

    assert waits(run) == []


def test_messages_match_by_their_two_ends_and_tag():
    run = Synthetic(3)
    for at, (source, destination, tag) in enumerate([(0, 1, 0), (0, 2, 0), (0, 1, 5), (0, 1, 0)]):
        begin = BEGIN_NS + at * 10 * MS
        run.call(source, "send", begin, begin + MS, peer=destination, tag=tag)
        run.call(destination, "recv", begin - 2 * MS, begin + MS, peer=source, tag=tag)
    run.call(2, "recv", BEGIN_NS, -1, peer=-1)
    calls = run.rows("call")

    matched = match_messages(run, calls)

    assert waits(run) == []
    assert calls["tag"][matched.index].tolist() == [0, 0, 0, 0, 5, 5, 0, 0]
    assert sorted((matched.waited_ns // MS).tolist()) == [0, 0, 0, 0, 2, 2, 2, 2]


def test_one_number_for_several_keys_has_their_order():
    """Also if the keys differ so much that their product exceeds any integer type."""
    chance = np.random.default_rng(1)
    for most in (3, 1 << 20, 1 << 40, 1 << 62):
        keys = tuple(chance.integers(-most, most, 500) for _ in range(4))
        keys = (*keys, keys[0] // max(1, most // 2), chance.integers(0, 5, 500).astype(np.uint32))
        packed = _packed(keys)
        rows = list(zip(*reversed(keys), strict=True))
        assert packed.argsort(kind="stable").tolist() == np.lexsort(keys).tolist()
        assert len(np.unique(packed)) == len(set(rows))


@pytest.mark.slow
def test_a_hundred_thousand_calls_are_matched_at_once():
    run = Synthetic(4)
    run.call(0, "all_reduce", BEGIN_NS, BEGIN_NS)
    rows = np.repeat(run.rows("call"), 100_000)
    rows["rank"] = np.arange(100_000) % 4
    rows["number"] = np.arange(100_000) // 4
    rows["issue_ns"] += np.arange(100_000) * 1000
    rows["end_ns"] = rows["issue_ns"] + 4000
    run._tables["call"] = rows.astype(CALL)

    begin = time.process_time()
    found = waits(run)

    assert len(found) == 25_000
    assert time.process_time() - begin < 1


# ---- who is slow


@pytest.mark.long
@pytest.mark.parametrize("is_ddp", [True, False], ids=["DDP", "all_reduce"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_slow_rank_is_named_with_its_phase_20_of_20(phase, is_ddp):
    for seed in range(20):
        run = simulate(
            slow=seed % 4, phase=phase, extra_ms=50, noise_ms=4, clock_error_ns=200_000, is_ddp=is_ddp, seed=seed
        )
        found = straggler(run)
        assert found is not None and (found.rank, found.phase) == (seed % 4, phase), seed
        assert found.share > 0.8 and abs(found.lost_ns - 50 * MS) < 15 * MS


@pytest.mark.long
@pytest.mark.parametrize("noise_ms", [0, 0.5, 4, 10])
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("is_ddp", [True, False], ids=["DDP", "all_reduce"])
def test_nobody_is_named_without_a_slow_rank_20_of_20(noise_ms, world_size, is_ddp):
    for seed in range(20):
        run = simulate(world_size=world_size, noise_ms=noise_ms, clock_error_ns=200_000, is_ddp=is_ddp, seed=100 + seed)
        assert straggler(run) is None, seed


def test_the_evidence_is_in_the_answer():
    found = straggler(simulate(slow=1, phase="forward", extra_ms=20))

    assert found is not None
    assert (found.rank, found.share, found.steps, found.phase) == (1, 1.0, 18, "forward")
    assert found.lost_ns == 20 * MS
    assert found.factor == pytest.approx(3)
    assert found.evidence == (
        "rank 1 came last in 18 of 18 steps, and the others waited 20.0 ms of each step for it (mean); "
        "its forward takes 30.0 ms, theirs 10.0 ms (medians)"
    )


@pytest.mark.parametrize(
    "thin",
    [
        {"steps": 6},  # the first two are ignored
        {"extra_ms": 1.5},  # less than 5 % of a step
        {"extra_ms": 0.5, "forward_ms": 1, "backward_ms": 1, "transfer_ms": 0.1},  # less than 1 ms
        {"extra_ms": 5},  # 18 steps: another process can slow down a rank for that long
        {"world_size": 1, "slow": 0},
        {"world_size": 2, "steps": 8},  # by chance, one of two ranks is last six times in a row
    ],
    ids=str,
)
def test_thin_evidence_names_nobody(thin):
    assert straggler(simulate(**{"slow": 1, "phase": "forward", "extra_ms": 50} | thin)) is None


def test_a_small_loss_in_many_steps_is_named():
    found = straggler(simulate(slow=1, phase="forward", extra_ms=5, noise_ms=0.2, steps=60))

    assert found is not None and (found.rank, found.phase, found.steps) == (1, "forward", 58)


def test_two_ranks_that_are_equally_slow_are_no_straggler():
    run = simulate(slow=2, phase="forward", extra_ms=50, into=None)
    calls, spans = run.rows("call"), run.rows("span")
    for rows in (calls, spans):  # rank 3 does the same as rank 2
        copied = rows[rows["rank"] == 2].copy()
        copied["rank"] = 3
        rows[rows["rank"] == 3] = copied

    assert straggler(run) is None


def test_the_default_straggler_is_of_the_last_cell_with_steps():
    run = simulate(slow=1, phase="forward", extra_ms=50, cell=1)
    run = simulate(slow=3, phase="input", extra_ms=50, cell=2, into=run)

    assert [found and found.rank for found in (straggler(run, 1), straggler(run, 2), straggler(run))] == [1, 3, 3]
    assert straggler(run, 7) is None


def test_time_outside_of_the_steps_is_named():
    """Such as a checkpoint of rank 2 after each step."""
    run = simulate(slow=2, phase="outside", extra_ms=50, noise_ms=3)
    found = straggler(run)

    assert found is not None
    assert (found.rank, found.phase) == (2, "outside")
    assert re.search(r"between its steps it takes 5\d\.\d ms, theirs", found.evidence), found.evidence
    text = str(report(run))
    assert re.search(r"^\d\d % of the step waits for rank 2, which takes 5\d\.\d ms between its steps", text, re.M), (
        text
    )
    assert "slows down its code between two steps" in text


def test_without_optimizer_steps_the_collectives_tell():
    found = straggler(simulate(slow=2, phase="forward", extra_ms=50, is_ddp=False, has_optimizer=False, noise_ms=2))

    assert found is not None
    assert (found.rank, found.phase, found.steps) == (2, "between", 17)
    assert "of 17 collectives" in found.evidence
    assert straggler(simulate(is_ddp=False, has_optimizer=False, noise_ms=2)) is None


@pytest.mark.parametrize(("late_ms", "is_named"), [([25, 26, 24], True), ([1, 30, 60], False)])
def test_a_loss_that_scatters_is_thin_evidence(late_ms, is_named):
    run = Synthetic(3)
    for at in range(30):
        begin = BEGIN_NS + at * 100 * MS
        arrivals = [begin, begin, begin + late_ms[at % 3] * MS]
        for rank in range(3):
            run.call(rank, "all_reduce", arrivals[rank], max(arrivals) + MS)

    assert (straggler(run) is not None) == is_named


def test_nothing_recorded_names_nobody():
    assert straggler(Synthetic(4)) is None
    assert waits(Synthetic(4)) == []


def test_the_real_recording_gives_the_same():
    run = simulate(slow=2, phase="backward", extra_ms=50, noise_ms=2)
    recording = Recording(4)
    for batch in run.batches():
        recording._feed(batch)

    assert recording.straggler() == straggler(run)
    assert [(one.number, one.last) for one in recording.waits()] == [(one.number, one.last) for one in waits(run)]
