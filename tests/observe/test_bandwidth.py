"""Bytes per second, counted as in nccl-tests."""

from __future__ import annotations

import pytest

from ddp_notebook.observe.recording import Recording
from ddp_notebook.observe.report.bandwidth import bandwidth, bus_factor
from ddp_notebook.records.schema import STATES
from tests.observe.synthetic import BEGIN_NS, MS, Synthetic, simulate

MB = 1_000_000


def calls(run: Synthetic, op: str, at_ms: float, ms: float, late_ms: float = 0, **more) -> None:
    """Add one collective of all ranks. The last rank is late, and the transfer then takes `ms`."""
    for rank in range(run.world_size):
        begin = BEGIN_NS + int((at_ms + (late_ms if rank == run.world_size - 1 else 0)) * MS)
        run.call(rank, op, begin, BEGIN_NS + int((at_ms + late_ms + ms) * MS), **more)


@pytest.mark.parametrize(
    ("op", "factor"),
    [
        ("all_reduce", 1.5),
        ("all_reduce_coalesced", 1.5),
        ("all_gather", 0.75),
        ("all_gather_single", 0.75),
        ("reduce_scatter_single_coalesced", 0.75),
        ("all_to_all_single", 0.75),
        ("gather", 0.75),
        ("scatter", 0.75),
        ("broadcast", 1),
        ("reduce", 1),
        ("send", 1),
    ],
)
def test_the_factors_are_those_of_nccl_tests(op, factor):
    assert bus_factor(op, 4) == factor


def test_waiting_for_a_slow_rank_is_no_transfer():
    run = Synthetic(4)
    for at in range(5):
        calls(run, "all_reduce", at * 100, 2, late_ms=50, nbytes=8 * MB)

    (one,) = bandwidth(run)

    assert (one.op, one.group, one.world_size, one.nbytes, one.count) == ("all_reduce", "default", 4, 8 * MB, 5)
    assert one.transfer_ns == 2 * MS
    assert (one.algorithm_gb_s, one.bus_gb_s) == (4.0, 6.0)


def test_the_size_is_that_of_the_whole():
    run = Synthetic(4)
    calls(run, "all_gather", 0, 1, nbytes_in=MB, nbytes_out=4 * MB)
    calls(run, "reduce_scatter", 10, 1, nbytes_in=4 * MB, nbytes_out=MB)
    for rank in range(4):  # only the root has the whole
        run.call(rank, "gather", BEGIN_NS, BEGIN_NS + MS, nbytes_in=MB, nbytes_out=4 * MB if rank == 2 else 0)

    assert {(one.op, one.nbytes, one.algorithm_gb_s) for one in bandwidth(run)} == {
        ("all_gather", 4 * MB, 4.0),
        ("reduce_scatter", 4 * MB, 4.0),
        ("gather", 4 * MB, 4.0),
    }


def test_sizes_and_groups_are_told_apart_and_the_median_counts():
    run = Synthetic(2)
    for at, ms in enumerate((1, 1, 9)):
        calls(run, "all_reduce", at * 10, ms, nbytes=MB)
        calls(run, "all_reduce", at * 10 + 200, 4, nbytes=2 * MB)
        calls(run, "all_reduce", at * 10 + 400, 5, nbytes=2 * MB, group="other")

    assert [(one.group, one.nbytes, one.count, one.transfer_ns // MS) for one in bandwidth(run)] == [
        ("default", MB, 3, 1),
        ("default", 2 * MB, 3, 4),
        ("other", 2 * MB, 3, 5),
    ]


def test_overlapping_transfers_are_left_out_if_others_exist():
    run = Synthetic(2)
    for at in range(3):
        calls(run, "all_reduce", at * 100, 1, nbytes=MB)
        calls(run, "all_reduce", at * 100 + 50, 6, nbytes=MB)
        calls(run, "broadcast", at * 100 + 52, 6, nbytes=3 * MB)

    found = {one.op: (one.count, one.transfer_ns // MS) for one in bandwidth(run)}

    assert found == {"all_reduce": (3, 1), "broadcast": (3, 6)}


def test_a_message_counts_once():
    run = Synthetic(3)
    run.call(0, "send", BEGIN_NS, BEGIN_NS + 2 * MS, peer=1, nbytes=MB)
    run.call(1, "recv", BEGIN_NS + MS, BEGIN_NS + 2 * MS, peer=0, nbytes=MB)

    (one,) = bandwidth(run)

    assert (one.op, one.world_size, one.count, one.bus_gb_s) == ("send", 2, 1, 1.0)


def test_what_failed_or_moves_nothing_has_no_bandwidth():
    run = Synthetic(2)
    calls(run, "barrier", 0, 1, nbytes=0)
    calls(run, "all_reduce", 10, 1, state=STATES.index("failed"))
    for rank in (0, 1):
        run.call(rank, "all_reduce", BEGIN_NS, -1)

    assert bandwidth(run) == []
    assert bandwidth(Synthetic(2)) == []


def test_the_real_recording_gives_the_same():
    run = simulate(noise_ms=3)
    recording = Recording(4)
    for batch in run.batches():
        recording._feed(batch)

    assert recording.bandwidth() == bandwidth(run) != []
    assert recording.bandwidth(cell=5) == []
