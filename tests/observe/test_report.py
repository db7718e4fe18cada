"""Reports of a training cell in numbers and text."""

from __future__ import annotations

import mmap
import re
import threading
import time
from typing import Any

import numpy as np
import pytest

from ddp_notebook.observe.figures import figures
from ddp_notebook.observe.recording import Recording
from ddp_notebook.observe.report import rpc_sentences
from ddp_notebook.observe.report.bubbles import Bubble
from ddp_notebook.observe.report.loading import Started, loading, loads_usually
from ddp_notebook.observe.report.report import report
from ddp_notebook.observe.steps.steps import measure
from ddp_notebook.observe.steps.waits import straggler
from ddp_notebook.records.codec import Batch
from ddp_notebook.records.schema import ORIGINS, SPANS
from ddp_notebook.records.units import ms, percent
from ddp_notebook.widgets import simulate as simulated
from ddp_notebook.widgets.still import saved_summary
from tests.observe.batches import Rank
from tests.observe.synthetic import BEGIN_NS, MS, Synthetic, simulate


def test_the_text_says_what_the_steps_took_and_why():
    assert str(report(simulate(world_size=3, slow=2, phase="forward", extra_ms=50))) == "\n".join(
        [
            "cell 1: 20 steps on 3 ranks, 84.5 ms/step (mean of steps 2 to 19 without the shortest and the longest, of "
            "3 ranks), 1,136 samples/s, effective batch 32 x 3 ranks = 96",
            "",
            "rank  step ms  input  compute  exposed  waiting  optimizer   rest  samples/s",
            "all      84.5    1 %     55 %      1 %     39 %        2 %  0.6 %       1136",
            "0        84.5    1 %     36 %      1 %     59 %        2 %  0.6 %        379",
            "1        84.5    1 %     36 %      1 %     59 %        2 %  0.6 %        379",
            "2        84.5    1 %     95 %      1 %      0 %        2 %  0.6 %        379",
            "",
            "59 % of the step waits for rank 2, whose forward takes 6.0 times the others'.",
            "Try:",
            "- give rank 2 less work, or find out what slows down its forward: it costs the others 50.0 ms of each "
            "step (mean)",
            "",
            "ms of a step  mean  median  90 %   max",
            "step          84.5    84.5  84.5  84.5",
            "input          1.0     1.0   1.0   1.0",
            "forward       26.7    10.0  60.0  60.0",
            "backward      20.0    20.0  20.0  20.0",
            "exposed        1.0     1.0   1.0   1.0",
            "waiting       33.3    50.0  50.0  50.0",
            "optimizer      2.0     2.0   2.0   2.0",
            "rest           0.5     0.5   0.5   0.5",
            "",
            "time of the cell       times     s  share",
            "steps in the mean         16  1.35   80 %",
            "steps not in the mean      4  0.34   20 %",
        ]
    )


def test_the_bound_on_the_clocks_of_other_hosts_is_said():
    run = simulate(noise_ms=0.3)
    run.clock_errors_ns = [0, 200_000, 0, 300_000]
    assert report(run).notes == ("The clocks of the hosts agree to within 500 µs: shorter waits are not reported",)


HOSTS = ("gpu1", "gpu1", "gpu2", "gpu2")


def test_a_rank_is_blamed_with_its_host():
    run = simulate(slow=2, phase="forward", extra_ms=50)
    run.hosts = HOSTS
    found = report(run)
    assert found.verdict == "59 % of the step waits for rank 2 on gpu2, whose forward takes 6.0 times the others'"
    assert found.straggler is not None and found.straggler.evidence.startswith("rank 2 on gpu2 came last in 18 of 18")


@pytest.mark.parametrize(
    ("hosts", "clock_error_ns", "verdict"),
    [
        (
            HOSTS,
            0,
            "66 % of the step waits for the network between gpu1 and gpu2: all ranks had arrived, and 1.3 GB/s were ",
        ),
        (
            ("a", "b", "c", "d"),
            0,
            "66 % of the step waits for the network between 4 hosts: all ranks had arrived, and ",
        ),
        ((), 0, "66 % of the step is communication that no compute hides"),
        (
            HOSTS,
            30 * MS,
            "is communication that no compute hides. Waiting for the network and for a rank cannot be separated",
        ),
    ],
    ids=["two hosts", "many hosts", "one machine", "clocks that are not known well enough"],
)
def test_what_no_rank_came_late_for_is_the_networks(hosts, clock_error_ns, verdict):
    run = simulate(transfer_ms=20, bucket_nbytes=25 << 20)
    run.clock_errors_ns, run.hosts = [clock_error_ns] * 4, hosts
    assert verdict in report(run).verdict


def test_the_network_is_not_blamed_for_what_stays_on_a_host():
    """Each host averages over its own ranks; an occasional barrier joins them."""
    run = simulate(world_size=2, transfer_ms=20, is_ddp=False, buckets=1)
    run.world_size, run.clock_errors_ns, run.hosts = 3, [0] * 3, ("gpu1", "gpu1", "gpu2")
    for rank in range(3):
        run.call(rank, "barrier", BEGIN_NS + 40 * MS, BEGIN_NS + 41 * MS, group="all", ranks=[0, 1, 2])
    assert "is communication that no compute hides" in report(run).verdict


def test_the_repr_is_one_line():
    assert repr(report(simulate(input_ms=30))) == (
        "Report(cell 1, 20 steps, 63.5 ms/step: 47 % of the step waits for the data loader)"
    )


@pytest.mark.parametrize(
    ("run", "verdict", "advice"),
    [
        ({"noise_ms": 0.3}, "Nothing is wrong: ", []),
        ({"input_ms": 30}, "47 % of the step waits for the data loader", ["load in the background (DataLoader with "]),
        (
            {"transfer_ms": 4, "buckets": 16},
            "57 % of the step is communication that no compute hides",
            [
                "a larger bucket_cap_mb: 16 buckets of 1.0 MB in each step, and 45.2 ms of their communication",
                "accumulate gradients over several passes (model.no_sync()): 45.2 ms of communication in each step ",
            ],
        ),
        (
            {"transfer_ms": 20, "bucket_nbytes": 25 << 20},
            "66 % of the step is communication that no compute hides",
            [
                "a comm hook that sends half the bytes (default_hooks.fp16_compress_hook): 105 MB of float32 ",
                "accumulate gradients over several passes (model.no_sync()): 65.0 ms of communication in each step ",
            ],
        ),
        (
            {"transfer_ms": 80, "buckets": 1, "micro_steps": 3, "synchronised": 3},
            "71 % of the step is communication that no compute hides",
            [
                "3 backward passes of each step send gradients. If they accumulate, put all but the last one under "
                "model.no_sync(): 240 ms of communication in each step ",
            ],
        ),
        (
            {"transfer_ms": 240, "buckets": 1, "micro_steps": 3},
            "71 % of the step is communication that no compute hides",
            [
                "accumulate gradients over more passes (model.no_sync()): 1 of the 3 backward passes of each step "
                "sends gradients, and 240 ms of communication in each step ",
            ],
        ),
        (
            {"is_ddp": False, "transfer_ms": 8},
            "49 % of the step is communication that no compute hides",
            ["DistributedDataParallel, or async_op=True and a later wait(): 32.0 ms of communication, of which 0 % "],
        ),
        (
            {"forward_ms": 0.3, "backward_ms": 0.5, "transfer_ms": 0.6, "input_ms": 0.1, "between_ms": 0.1},
            "40 % of the step is communication that no compute hides",
            [
                "accumulate gradients over several passes (model.no_sync()): 2.02 ms of communication in each step ",
                "a larger batch: forward and backward are 800 µs of a step of 5",
            ],
        ),
        ({"between_ms": 40}, "54 % of the step belongs to no phase: Python code between the phases", []),
        (
            {"noise_ms": 8},
            "26 % of the step the ranks wait for each other: no single rank is late",
            ["give all ranks batches of equal work, and each rank its own CPU core: they wait 19.8 ms of each step"],
        ),
        (
            {"slow": 0, "phase": "input", "extra_ms": 50, "world_size": 2},
            "59 % of the step waits for rank 0, whose input takes 51.0 ms, the others' 1.00 ms",
            ["check the data that rank 0 loads, and its source: it costs the others 50.0 ms of each step (mean)"],
        ),
        (
            {"slow": 1, "phase": "between", "extra_ms": 50},
            "59 % of the step waits for rank 1, which takes 50.5 ms between its phases, the others 500 µs",
            ["give rank 1 less work, or find out what slows down its code between forward, backward and optimizer"],
        ),
        ({"world_size": 1, "transfer_ms": 20}, "66 % of the step is communication of rank 0 with itself", []),
    ],
    ids=str,
)
def test_the_verdict_and_what_to_try_follow_from_the_numbers(run, verdict, advice):
    found = report(simulate(**run))

    assert found.verdict.startswith(verdict)
    assert len(found.suggestions) == len(advice), found.suggestions
    for suggestion, begin in zip(found.suggestions, advice, strict=True):
        assert suggestion.startswith(begin)


def one_cell(*trainings: dict[str, Any]) -> Synthetic:
    """Return a cell in which two ranks train several times."""
    run = Synthetic(2)
    for training in trainings:
        options: dict[str, Any] = {"world_size": 2, "noise_ms": 0.3, "extra_ms": 40, "phase": "between"}
        run = simulate(**options | training, into=run)
    return run


@pytest.mark.parametrize(
    "trainings",
    [
        [{"slow": 1, "steps": 7}],
        [{}, {"slow": 0}],
        [{"slow": 0}, {"slow": 1}],
        [{"steps": 3, "slow": 0}],
        [{"steps": 1}],
    ],
    ids=str,
)
def test_the_parts_add_up_and_all_is_the_mean_of_the_ranks(trainings):
    found = report(one_cell(*trainings))

    assert found.overall is not None
    for parts in (found.overall, *found.ranks):
        times = (
            parts.input_ns,
            parts.compute_ns,
            parts.exposed_ns,
            parts.waiting_ns,
            parts.optimizer_ns,
            parts.rest_ns,
        )
        assert sum(times) == pytest.approx(parts.step_ns)
    assert found.overall.waiting_ns == pytest.approx(sum(parts.waiting_ns for parts in found.ranks) / 2)


@pytest.mark.parametrize(
    ("trainings", "verdict"),
    [
        (
            [{"slow": 1, "steps": 7, "noise_ms": 0}],
            "Too few steps to name a slow rank: 5, of which rank 0 waits 54 % and rank 1 0 %; it takes at least 8",
        ),
        (
            [{"slow": 1, "steps": 3, "noise_ms": 0}],
            "Too few steps to name a slow rank: 1, of which rank 0 waits 54 % and rank 1 0 %; it takes at least 8",
        ),
        (
            [{"steps": 10}, {"slow": 0, "steps": 10}],
            "39 % of the step waits for rank 0, but not in every step, or too little in all to call it slow",
        ),
        (
            [{"slow": 0, "extra_ms": 400}, {"slow": 1, "extra_ms": 400, "between_ms": 20}],  # more rest than waiting
            "45 % of the step the ranks wait for each other: no single rank is late",
        ),
        ([{"slow": 0}, {"slow": 1}], "27 % of the step the ranks wait for each other: no single rank is late"),
    ],
    ids=str,
)
def test_waiting_is_told_as_the_table_has_it(trainings, verdict):
    found = report(one_cell(*trainings))

    assert found.straggler is None
    assert found.verdict == verdict


@pytest.mark.parametrize("trainings", [[{"steps": 10}, {"slow": 0, "steps": 10}], [{"slow": 0}, {"slow": 1}]], ids=str)
def test_the_picture_of_the_steps_says_the_same(trainings):
    run = one_cell(*trainings)
    overall = report(run).overall

    assert overall is not None
    waiting = percent(overall.share(overall.waiting_ns))
    assert f"{waiting} waiting for others" in figures.steps(run).get_suptitle()


def test_what_a_slow_rank_costs_is_a_part_of_the_step():
    """Most of its steps are slow, so their median is longer than the mean step."""
    found = report(one_cell({"steps": 12}, {"slow": 0, "extra_ms": 400, "steps": 24}))

    assert found.straggler is not None and found.overall is not None
    assert found.straggler.lost_ns == round(found.ranks[1].waiting_ns) < found.overall.step_ns
    assert found.suggestions[0].endswith(f": it costs the others {ms(found.ranks[1].waiting_ns)} of each step (mean)")


@pytest.mark.parametrize("seed", range(3))
def test_all_sentences_on_a_slow_rank_have_the_same_number(seed):
    run = simulate(slow=2, phase="forward", extra_ms=50, noise_ms=8, seed=seed)
    found, alone = report(run), straggler(run)

    assert alone is not None and found.overall is not None and found.straggler == alone
    waited = float(np.mean([parts.waiting_ns for parts in found.ranks if parts.rank != 2]))
    assert alone.lost_ns == round(waited)
    assert f"the others waited {ms(waited)} of each step for it (mean)" in alone.evidence
    assert found.suggestions[0].endswith(f": it costs the others {ms(waited)} of each step (mean)")
    assert found.verdict.startswith(f"{percent(waited / found.overall.step_ns)} of the step waits for rank 2")


def test_the_printed_samples_per_second_of_the_ranks_add_up():
    """13.8 and not 3, 3, 4, 3 with a total of 14."""
    for samples, step_ms in ((3, 1000), (4, 1150), (100, 100), (1, 9000)):
        lines = str(report(simulate(samples=samples, forward_ms=step_ms / 2, backward_ms=step_ms / 2))).splitlines()
        first = next(at for at, line in enumerate(lines) if line.startswith("rank  step ms"))
        total, *ranks = (line.split()[-1] for line in lines[first + 1 : first + 6])
        assert float(total) == pytest.approx(sum(map(float, ranks)), rel=0.01)
        assert f" {float(total):,.{len(total.partition('.')[2])}f} samples/s" in lines[0]


def test_one_rank_that_steps_may_wait_for_others_that_do_not():
    run = simulate(world_size=2, slow=1, phase="forward", extra_ms=50)
    spans = run.rows("span")
    run._tables["span"] = spans[spans["rank"] == 0]

    found = report(run)

    assert found.verdict == "59 % of the step waits for other ranks"
    assert len(found.ranks) == 1 and not found.suggestions


def test_one_step_with_a_pause_changes_nothing():
    calm, paused = (report(one_cell({"noise_ms": 0}, *more)) for more in ([], [{"between_ms": 5000, "steps": 1}]))

    assert calm.overall is not None and paused.overall is not None
    assert paused.overall.step_ns == pytest.approx(calm.overall.step_ns)


def test_the_report_detects_gradients_copied_out_of_buckets():
    run = simulate(steps=12)
    spans = run.rows("span")
    for at in range(len(spans)):  # each backward ends 4 ms later, and everything after it too
        after = (spans["start_ns"] >= spans["end_ns"][at]) & (spans["rank"] == spans["rank"][at])
        if spans["kind"][at] == 2:
            calls = run.rows("call")
            later = (calls["issue_ns"] >= spans["end_ns"][at]) & (calls["rank"] == spans["rank"][at])
            for name in ("issue_ns", "end_ns"):
                calls[name][later] += 4 * MS
            for name in ("start_ns", "end_ns"):
                spans[name][after] += 4 * MS
            spans["end_ns"][at] += 4 * MS

    (text,) = report(run).suggestions

    assert text.startswith("gradient_as_bucket_view=True: 4.00 ms of each backward come after the last bucket")


def test_pinned_memory_is_for_gpus():
    run = simulate(input_ms=30)
    run.add("resource", rank=0, time_ns=BEGIN_NS, gpu_allocated_bytes=1 << 30)

    assert "DataLoader with num_workers, pin_memory=True, prefetch_factor" in report(run).suggestions[0]


@pytest.mark.parametrize(
    ("what", "faults_of_seconds", "more", "is_told"),
    [
        ("each step", [120_000] * 4, {}, True),
        ("each step, and much more once", [120_000, 120_000, 10**6, 120_000], {}, True),
        ("each step, and a new process", [120_000, 120_000, -(10**7), 120_000], {}, True),
        ("once", [0, 10**6, 0, 0], {}, False),
        ("too few", [30_000] * 4, {}, False),
        ("memory that grows", [120_000] * 4, {"rss_bytes": 120_000 * mmap.PAGESIZE}, False),
        ("a GPU", [120_000] * 4, {"gpu_allocated_bytes": 1}, False),
        ("not counted", [0] * 4, {}, False),
    ],
)
def test_memory_that_each_step_takes_anew_is_noticed(what, faults_of_seconds, more, is_told):
    run = simulate(world_size=2, steps=150)
    faults = 10**8 if any(faults_of_seconds) else 0
    for second, of_second in enumerate([10**7, *faults_of_seconds], -1):  # first while the model was created
        faults += of_second
        grown = {name: second * value for name, value in more.items()}
        row = {"gpu_allocated_bytes": -1, "page_faults": faults * (what != "not counted"), **grown}
        for rank in (1, 0):
            run.add("resource", rank=rank, time_ns=BEGIN_NS + int((second + 1.1) * 1e9), **row)

    found = report(run)
    assert (
        found.verdict == "18 % of the step is page faults: the ranks get memory from the system again in each step"
    ) == is_told
    assert [text for text in found.suggestions if "page faults" in text] == is_told * [
        "ranks that keep the memory of tensors below 32 MB when it is freed: start them with --env "
        "MALLOC_TRIM_THRESHOLD_=268435456 --env MALLOC_MMAP_THRESHOLD_=33554432. Each step gets memory from the "
        "system again: 4,140 page faults or about 6.21 ms"
    ]


def test_the_scaling_efficiency_compares_with_one_rank_alone():
    run = simulate(world_size=4)
    found = report(run)
    assert found.efficiency is None
    assert found.overall is not None and found.overall.samples_per_s is not None

    run.baseline = {"samples_per_s": found.overall.samples_per_s / 4 / 0.8, "step_ns": 30 * MS, "world_size": 1}
    assert report(run).efficiency == pytest.approx(0.8)
    head, note = str(report(run)).splitlines()[:2]
    assert "one rank alone" not in head
    assert note == "That is 80 % of 4 times one rank alone: 30.0 ms a step, 1,159 samples/s."

    unknown = simulate(world_size=4, samples=-1)
    unknown.baseline = {"samples_per_s": None, "step_ns": found.overall.step_ns / 2, "world_size": 1}
    assert report(unknown).efficiency == pytest.approx(0.5)
    assert "samples/s," not in str(report(unknown))


def test_the_baseline_of_one_rank_is_compared_only_with_its_cell():
    run = simulate(cell=2, into=simulate(cell=1))
    run.baseline = {"samples_per_s": 1000.0, "step_ns": 32 * MS, "world_size": 1, "cell": 1}

    assert report(run, 1).efficiency is not None
    assert report(run, 2).efficiency is None
    assert "The baseline of one rank was measured in cell 1, so this cell is not compared with it." in str(
        report(run, 2)
    )


def test_rows_that_were_lost_are_told():
    run, nothing = simulate(), Synthetic(2)
    assert "lost" not in str(report(run))
    run.dropped, nothing.dropped = {0: 1100, 2: 98}, {1: 1}

    assert str(report(run)).splitlines()[1] == "1,198 rows were lost: some steps may be missing."
    assert str(report(nothing)).endswith("\n1 row was lost: some steps may be missing.")


def test_the_last_cell_that_holds_steps_is_reported():
    run = simulate(cell=3)
    run.span(0, "cell", "", BEGIN_NS + 10**12, BEGIN_NS + 10**12 + MS, cell=9)

    assert report(run).cell == 3


def test_without_steps_it_says_what_is_missing_and_how_to_get_it():
    ask = (
        "The ranks record the steps of torch.optim optimizers and their subclasses, and those of DistributedOptimizer "
        "on the rank that calls them"
    )
    off = "If recording is off, %ddp_record values turns it on."

    assert str(report(Synthetic(4))) == f"No optimizer step was recorded. {ask}. {off}"
    assert str(report(Synthetic(4), cell=9)) == f"No optimizer step was recorded in cell 9. {ask}. {off}"
    assert str(report(simulate(is_ddp=False, has_optimizer=False))) == (
        f"No optimizer step was recorded, only 80 communication calls. {ask}."
    )
    assert str(report(simulate(), cell=7)) == (
        "Nothing was recorded in cell 7. The last cell with optimizer steps is cell 1."
    )


def test_one_rank_has_one_row_and_communicates_with_itself():
    found = report(simulate(world_size=1, transfer_ms=20))

    assert found.verdict == "66 % of the step is communication of rank 0 with itself"
    lines = str(found).splitlines()
    assert "Rank 0 is the only rank: exposed is the time of its communication with itself." in lines
    first = next(at for at, line in enumerate(lines) if line.startswith("rank  step ms"))
    assert lines[first + 1].startswith("0 ") and lines[first + 2] == "", "no row for all ranks"


def test_calls_that_have_not_returned_are_not_counted_as_served():
    recording, caller = Recording(2), Rank(0)
    for number, end_ns in enumerate((9 * MS, *[-1] * 5), 1):
        row = caller.row("rpc", side=0, number=number, src=0, dst=1, function=f"f{number}", start_ns=MS, end_ns=end_ns)
        recording._feed(caller.batch(row))
    served, *_, is_open = rpc_sentences.served(recording, None)
    assert served.startswith("Remote calls: rank 1 served 1 call (")
    assert is_open.endswith("f4 from rank 0 to rank 1, f5 from rank 0 to rank 1, 1 other")


def test_of_one_or_two_steps_it_says_only_how_long_they_took():
    assert str(report(simulate(steps=1))) == (
        "cell 1: 1 step on 4 ranks\nstep 0: 37.5 ms on rank 0, 37.5 ms on rank 1, 37.5 ms on rank 2, 37.5 ms on rank 3"
    )
    of_many = str(report(simulate(steps=2, world_size=9, noise_ms=20)))
    assert re.fullmatch(r"cell 1: 2 steps on 9 ranks(\nstep [01]: \d+ ms to \d+ ms on 9 ranks){2}", of_many)


def test_the_real_recording_gives_the_same():
    run = simulate(slow=1, phase="input", extra_ms=50, noise_ms=2)
    recording = Recording(4)
    for batch in run.batches():
        recording._feed(batch)

    assert recording.report() == report(run)


def test_a_sharded_model_is_not_told_to_use_ddp():
    by_hand, sharded = (report(simulate(is_ddp=False, transfer_ms=8, origin=origin)) for origin in ("user", "fsdp"))
    assert any("DistributedDataParallel" in text for text in by_hand.suggestions)
    assert not any("DistributedDataParallel" in text for text in sharded.suggestions)


def test_a_full_recording_reports_kept_steps_and_all_steps():
    whole = simulate(world_size=2, steps=60)
    full = Recording(2, capacity={"span": 200})
    spans = whole.rows("span")
    spans = spans[np.argsort(spans["end_ns"], kind="stable")]
    texts = {number: whole.text(number) for number in np.unique(spans["name"]).tolist() if number}
    for rank in (0, 1):
        full._feed(Batch(rank=rank, stream=rank, texts=texts, tables={}))
    for at in range(len(spans)):
        rank = int(spans["rank"][at])
        full._feed(Batch(rank=rank, stream=rank, tables={"span": spans[at : at + 1]}))
    found = report(full)
    assert found.all_steps == 60 and 0 < found.steps < 58
    assert str(found).startswith(f"cell 1: the last {found.steps} of 60 steps on 2 ranks, ")
    assert f"the last {found.steps} of 60 steps" in repr(found)
    assert ", 60 steps, " in saved_summary.text(full)
    assert str(report(whole)).startswith("cell 1: 60 steps on 2 ranks, ")


@pytest.mark.parametrize(
    ("ready", "own", "busy", "says"),
    [
        (0.7, 0.25, 1.95, "On average, a rank had no free core for 24.1 ms of 34.5 ms: other processes "),
        (
            0.7,
            0.95,
            1.95,
            "On average, a rank had no free core for 24.1 ms of 34.5 ms: the ranks themselves ",
        ),
        # The processes that used the cores are unknown.
        (0.7, 0.2, 0.6, "On average, a rank had no free core for 24.1 ms of 34.5 ms"),
        (0.1, 0.6, 1.9, "Nothing is wrong: 87 % of the step computes"),  # they hardly waited for a core
    ],
)
def test_other_processes_that_take_the_cores_are_said_first(ready, own, busy, says):
    run = simulate(world_size=2, steps=60)
    for second in range(3):
        for rank in (0, 1):
            counted = {"ready_ns": ready, "ran_ns": own, "host_busy_ns": busy}
            row = {name: int(1e9 + second * 1e9 * share) for name, share in counted.items()}
            gpu = {"gpu_allocated_bytes": -1, "page_faults": 0}
            run.add("resource", rank=rank, time_ns=BEGIN_NS + second * 10**9, cores=2, host_cores=2, **row, **gpu)
    found = report(run)
    assert found.verdict.startswith(says)
    if "other processes" in says:
        assert found.verdict.endswith("used 1.4 of the 2 cores")
        assert str(found).splitlines()[1] == f"{found.verdict}." and found.suggestions[0].startswith("measure again")
    else:
        assert found.verdict.endswith("used 1.9 of the 2 cores") == ("themselves" in says)
        assert not any("measure again" in text for text in found.suggestions)


@pytest.mark.long
def test_a_report_is_fast_and_does_not_block_other_threads():
    recording = simulated(world_size=2, steps=16_000, values=False)
    steps = len(recording.steps(cell=2))
    assert steps == 16_000, "8,000 on each rank"
    gaps, ends = [], threading.Event()

    def tick() -> None:
        last = time.monotonic()
        while not ends.wait(0.005):
            now = time.monotonic()
            gaps.append(now - last)
            last = now

    report(recording, 2)  # imports
    ticking = threading.Thread(target=tick)
    ticking.start()
    began = time.process_time()
    report(recording, 2)
    took = time.process_time() - began
    ends.set()
    ticking.join()
    assert took <= 0.45, f"{took:.2f} s"
    assert max(gaps) < 0.3, f"{max(gaps):.2f} s"


def test_a_later_cell_without_an_optimizer_step_is_named():
    """The user expects the report of the last training loop."""
    run = simulate(cell=1)
    run.prompts[3] = "In [8]"
    at_ns = int(run.rows("span")["end_ns"].max())
    for rank in range(4):
        run.call(rank, "all_reduce", at_ns, at_ns + MS, cell=2)
    assert "optimizer step" not in str(report(run)), "collectives alone are no training loop"
    for rank in range(4):
        run.span(rank, "backward", "", at_ns + MS, at_ns + 2 * MS, cell=3)

    note = (
        "In [8] ran later with backward passes, but no optimizer step of it was recorded. This is the report of cell 1."
    )
    assert str(report(run)).splitlines()[1] == note
    assert "In [8]" not in str(report(run, 1)), "this cell was asked for"


def test_a_later_cell_without_a_step_is_named_after_few_steps():
    run = simulate(cell=1, steps=2)
    for rank in range(4):
        run.span(rank, "backward", "", *(int(run.rows("span")["end_ns"].max()) + ms * MS for ms in (1, 2)), cell=3)

    assert str(report(run)).splitlines()[-1].startswith("cell 3 ran later with backward passes, but no optimizer step")


@pytest.mark.parametrize(
    ("span_ms", "share"), [(40, "40 %"), (50, "50 %"), (115, "50 %")], ids=["shorter", "as long", "longer"]
)
def test_the_bubble_is_at_most_the_idle_share_of_the_pipeline(span_ms, share):
    """The span from the first rank's begin to the last rank's end can be longer than the step of one rank."""
    bubble = Bubble(schedule="GPipe", stages=2, microbatches=4, measured=0.5, ideal=0.2, span_ns=span_ms * MS)
    found, said = bubble.loss(step_ns=50 * MS)
    assert said == f"{share} of the step is the bubble of the pipeline: GPipe with 2 stages and 4 microbatches"
    assert found <= 0.5


# ---- the effective batch


def _head(run: Synthetic) -> str:
    return str(report(run)).splitlines()[0]


@pytest.mark.parametrize(
    ("shape", "batch"),
    [
        ({}, "32 x 4 ranks = 128"),
        ({"micro_steps": 2}, "32 x 4 ranks x 2 micro-steps = 256"),
        ({"micro_steps": 3, "world_size": 1}, "32 x 3 micro-steps = 96"),
        ({"samples": 7, "world_size": 2}, "7 x 2 ranks = 14"),
    ],
)
def test_the_head_has_the_effective_batch(shape, batch):
    assert _head(simulate(**shape)).endswith(f"samples/s, effective batch {batch}")


@pytest.mark.parametrize(
    "shape",
    [
        {"world_size": 1},  # nothing to multiply
        {"samples": -1},
        {"is_ddp": False},  # the program may give all ranks the same batch
        {"is_ddp": False, "origin": "dtensor"},
        {"is_ddp": False, "has_calls": False},
    ],
)
def test_a_batch_that_is_not_certain_is_not_told(shape):
    assert "effective batch" not in _head(simulate(**shape))


def _change_samples(run: Synthetic, change: Any) -> Synthetic:
    for row in run._rows["span"]:
        if row["samples"] > 0:
            row["samples"] = change(row)
    run._tables.clear()
    return run


def test_batches_that_differ_between_ranks_are_added():
    run = _change_samples(simulate(world_size=3), lambda row: 32 if row["rank"] < 2 else 16)
    assert _head(run).endswith("effective batch 32 x 2 (ranks 0,1) + 16 (rank 2) = 80")
    run = _change_samples(simulate(world_size=3), lambda row: 5 if row["step"] == 19 else 32)
    assert _head(run).endswith("effective batch 32 x 3 ranks = 96"), "the last batch of an epoch may be smaller"
    run = _change_samples(simulate(), lambda row: 20 + row["step"])
    assert "effective batch" not in _head(run), "each step has another one"


def test_ranks_with_the_same_inputs_count_once():
    run = simulate(micro_steps=2)
    run.same_inputs[1] = [[0, 1], [2, 3]]
    assert _head(run).endswith(
        "effective batch 32 x 2 ranks x 2 micro-steps = 128, because ranks 0,1 and ranks 2,3 had the same batches"
    )
    run.same_inputs[1] = [[0, 1, 2, 3]]
    assert _head(run).endswith("effective batch 32 x 2 micro-steps = 64, because ranks 0-3 had the same batches")
    run.same_inputs[1] = []
    assert "effective batch" not in _head(run), "only some steps had the same inputs"


def test_same_or_unknown_inputs_have_no_effective_batch():
    run = simulate(world_size=2)
    run.findings[1] = ("from step 0 on: ranks 0,1 gave model the same inputs (# ddp: ok same-batches)",)
    assert "effective batch" not in _head(run), "a file without the groups"
    run.findings[1] = ("step 5: another pass over the data has the same order (# ddp: ok same-epoch)",)
    assert "effective batch 32 x 2 ranks = 64" in _head(run)
    is_cell = SPANS.index("cell")
    run._rows["span"] = [row for row in run._rows["span"] if (row["kind"], row["rank"]) != (is_cell, 1)]
    run._tables.clear()
    assert "effective batch" not in _head(run), "rank 1 was killed in the cell, so its inputs were not compared"


def test_a_loader_that_is_slow_in_a_few_steps_is_not_blamed():
    """A rank may be paused in a step. The loader is not the cause."""
    few, each = simulate(world_size=2, steps=30), simulate(world_size=2, steps=30, input_ms=40)
    assert any("load in the background" in text for text in report(each).suggestions)
    started = Started(count=0, steps=30, workers_ns=0, steps_ns=1, cell_ns=None)
    options: dict[str, Any] = {"started": started, "has_gpu": False}
    assert loading(None, 10 * MS, 4 * MS, 0, cores_are_taken=False, **options)
    assert loading(None, 10 * MS, 4 * MS, 0, cores_are_taken=True, **options) == [], "the ranks wait for a core"
    assert loading(None, 10 * MS, 4 * MS, 0, cores_are_taken=False, is_usual=False, **options) == []
    assert loads_usually(measure(each)) and not loads_usually(measure(few))


def test_two_optimizers_have_no_effective_batch():
    run = simulate(world_size=2)
    for row in run._rows["span"]:
        if row["kind"] == SPANS.index("optimizer") and row["step"] % 2:
            row["name"] = run._texts.setdefault("Adam", len(run._texts))
    run._tables.clear()
    assert "effective batch" not in _head(run)


# ---- cells without an optimizer


def _infer(run: Synthetic, cell: int, count: int, kind: str = "evaluation") -> None:
    at = max(int(row["end_ns"]) for row in run._rows["span"]) + MS if run._rows["span"] else BEGIN_NS
    for rank in range(run.world_size):
        for number in range(count):
            begin = at + number * 20 * MS
            run.span(rank, kind, "Net", begin, begin + 10 * MS, cell=cell, samples=8)
        run.span(rank, "cell", f"In [{cell}]", at, at + count * 20 * MS, cell=cell)


def test_a_later_inference_cell_has_the_report():
    run = simulate(world_size=2)
    _infer(run, 2, 5)
    lines = str(report(run)).splitlines()
    assert lines == [
        "In [2] ran no optimizer step. The last cell with steps is cell 1, and session.report(1) shows its report.",
        "Inference: 5 forward passes of Net on ranks 0,1, median 10.0 ms, 889 samples/s of all ranks.",
    ]
    assert str(report(run, 1)).startswith("cell 1: 20 steps on 2 ranks")


def _in_cell_2(run: Synthetic, kinds: tuple[str, ...], count: int) -> list[str]:
    """Add spans of a second cell, and return the lines of its report after the first one."""
    for rank in range(run.world_size):
        for number in range(count):
            for kind in kinds:
                begin = 2 * BEGIN_NS + number * 20 * MS
                run.span(
                    rank, kind, "Net" if kind != "input" else "DataLoader", begin, begin + 10 * MS, cell=2, samples=8
                )
    return str(report(run)).splitlines()[1:]


@pytest.mark.parametrize(
    ("kinds", "line"),
    [
        (("forward", "backward"), "Passes: 4 backward passes and 4 forward passes on ranks 0,1."),
        (
            ("input",),
            "Input: 4 batches of DataLoader on ranks 0,1, 64 samples. Forward passes of models without DDP and FSDP "
            "are not recorded.",
        ),
        (("input", "evaluation"), "Inference: 4 forward passes of Net on ranks 0,1, median 10.0 ms"),
    ],
)
def test_a_cell_without_an_optimizer_says_what_it_did(kinds, line):
    assert _in_cell_2(simulate(world_size=2), kinds, 4)[0].startswith(line)


def test_a_cell_of_collectives_says_what_it_did():
    run = simulate(world_size=2)
    calls = [dict(row) for row in run._rows["call"][-1:]]
    for rank in range(2):
        for number in range(12):
            own = {
                "rank": rank,
                "cell": 2,
                "origin": ORIGINS.index("user"),
                "bucket": -1,
                "nbytes_in": 4000,
                "nbytes_out": 0,
            }
            times = {"issue_ns": 2 * BEGIN_NS, "start_ns": 2 * BEGIN_NS, "end_ns": 2 * BEGIN_NS + 3 * MS}
            run._rows["call"].append({**calls[0], **own, **times, "call": 1000 + number})
    run._tables.clear()
    assert str(report(run)).splitlines()[1:] == [
        "Communication: 12 calls of all_reduce on ranks 0,1, 4.0 kB each, median 3.00 ms."
    ]


def test_short_steps_give_no_advice_about_communication():
    options: dict[str, Any] = {"world_size": 2, "transfer_ms": 20, "bucket_nbytes": 25 << 20}
    advice = "accumulate gradients"
    run = simulate(**options)
    assert any(advice in one for one in report(run).suggestions), "cores are not counted"
    end = max(int(row["end_ns"]) for row in run._rows["span"])
    for rank in range(2):
        for second in range(2):  # both samples are from after the steps
            run.add("resource", rank=rank, time_ns=end + second * 1000 * MS, ran_ns=10 + second, gpu_allocated_bytes=-1)
    run._tables.clear()
    assert not any(advice in one for one in report(run).suggestions)


def test_inference_alone_has_a_report():
    run = Synthetic(2)
    _infer(run, 3, 4, "forward")
    assert str(report(run)).startswith("In [3] ran no optimizer step.\nInference: 4 forward passes of Net on ranks 0,1")


def test_a_look_at_the_result_keeps_the_report_of_the_training():
    run = simulate(world_size=2)
    _infer(run, 2, 2)
    assert str(report(run)).startswith("cell 1: 20 steps on 2 ranks")


def test_the_memory_of_a_rank_that_grows_alone_is_noted():
    run = simulate(world_size=2, steps=40)
    begin = min(int(row["start_ns"]) for row in run._rows["span"])
    for second in range(13):
        for rank in range(2):
            memory = 10**9 + rank * second * 5 * 10**7
            run.add("resource", rank=rank, time_ns=begin + second * 100 * MS, rss_bytes=memory)
    (note,) = (one for one in report(run).notes if "memory" in one)
    assert note == (
        "The resident memory of rank 1 alone grows: from 1.0 GB to 1.6 GB in 1.20 s. %ddp_memory shows the parts"
    )
