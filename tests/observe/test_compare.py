"""Comparison of two training runs, on simulated recordings whose differences are known."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddp_notebook import load
from ddp_notebook.__main__ import main
from ddp_notebook.errors import UsageError
from ddp_notebook.observe.compare.comparison import Comparison, compare
from ddp_notebook.observe.compare.named import compare_named, named
from ddp_notebook.observe.compare.numbers import NumberChange, Numbers
from ddp_notebook.observe.recording import Recording
from ddp_notebook.records.schema import ORIGINS, SIDES
from ddp_notebook.widgets import simulate as simulate_ranks
from tests.observe.synthetic import BEGIN_NS, LOADER, Synthetic, simulate


def recorded(run: Synthetic) -> Recording:
    recording = Recording(run.world_size)
    for batch in run.batches():
        recording._feed(batch)
    return recording


def compared(first: dict[str, Any], second: dict[str, Any]) -> Comparison:
    return compare(recorded(simulate(**first)), recorded(simulate(**second)))


def found(comparison: Comparison) -> list[tuple[str, int, int]]:
    """Return the parts that changed: part, rank and change in ms."""
    return [(one.part, one.rank, round(one.change_ns / 1e6)) for one in comparison.time.found]


# ---- time


def test_a_slow_phase_of_one_rank_is_the_cause():
    for phase, words in {
        "forward": "the forward of rank 2 takes 40.0 ms instead of 10.0 ms",
        "backward": "the backward of rank 2 takes 50.0 ms instead of 20.0 ms",
        "input": "the input of rank 2 takes 31.0 ms instead of 1.00 ms",
        "optimizer": "the optimizer of rank 2 takes 32.0 ms instead of 2.00 ms",
        "between": "the time between the phases of rank 2 is 30.5 ms instead of 500 µs",
    }.items():
        changed = compared({}, {"slow": 2, "phase": phase, "extra_ms": 30})
        assert changed.time.cause == words
        assert round(changed.time.explained_ns / 1e6) == round(changed.time.change_ns / 1e6) == 30
        part = "rest" if phase == "between" else phase
        assert sorted(found(changed)) == sorted([(part, 2, 30), *(("waiting", rank, 30) for rank in (0, 1, 3))])


def test_a_faster_run_has_the_cause_in_the_slower_one():
    changed = compared({"slow": 1, "phase": "forward", "extra_ms": 20}, {})
    assert changed.time.sentence == (
        "B is 20.0 ms faster than A per step (A: 54.5 ms, B: 34.5 ms, -37 %), because the forward of rank 1 takes "
        "10.0 ms instead of 30.0 ms"
    )


def test_a_change_of_all_ranks_names_them_together():
    changed = compared({}, {"forward_ms": 20.0})
    assert changed.time.cause == "the forward of all ranks takes 20.0 ms instead of 10.0 ms"
    assert changed.table()[1] == ["forward", "0-3", "10.0", "20.0", "+10.0", changed.table()[1][5]]
    slower = compared({}, {"transfer_ms": 8.0, "buckets": 4})
    assert "communication that no computation overlaps takes 17.0 ms instead of 1.00 ms" in slower.time.sentence


def test_the_part_of_a_hidden_rank_is_listed():
    """Rank 1 is slower than before, but rank 2 still determines the step."""
    base = recorded(simulate(slow=2, phase="forward", extra_ms=30))
    run = simulate(slow=2, phase="forward", extra_ms=30)
    for row in run._rows["span"]:  # the forward of rank 1 takes 15 ms of its wait
        if row["rank"] == 1 and row["kind"] in (1, 2):
            row["end_ns" if row["kind"] == 1 else "start_ns"] += 15_000_000
    for row in run._rows["call"]:
        if row["rank"] == 1:
            row["issue_ns"] += 15_000_000
    run._tables.clear()
    changed = compare(base, recorded(run))
    assert not changed.time.is_found
    assert found(changed) == [("forward", 1, 15), ("waiting", 1, -15)]


def test_equal_runs_have_no_finding():
    for seed in range(5):
        both = ({"noise_ms": 3, "seed": number, "world_size": 2} for number in (seed, 100 + seed))
        changed = compared(*both)
        assert not changed.is_found, changed
        assert changed.time.sentence.startswith("no change of the step time (A: ")


def test_a_change_below_the_noise_is_no_finding():
    quiet = compared({}, {"forward_ms": 13.0})
    assert quiet.time.is_found
    restless = compared({"noise_ms": 20, "seed": 1}, {"noise_ms": 20, "seed": 2, "forward_ms": 13.0})
    assert not restless.time.is_found and restless.time.noise_ns > 3 * quiet.time.noise_ns


def test_few_steps_are_no_evidence():
    changed = compared({"steps": 5}, {"steps": 20, "forward_ms": 50.0})
    assert not changed.is_found and not changed.exceeds(0.1)
    assert changed.time.sentence.startswith("too few steps to tell a change of the step time from noise (A: ")
    assert (
        "A has 3 steps after the first 2: times are compared from 8 on in the mean, so record at least 20 steps."
        in (str(changed).splitlines())
    )
    assert changed.to_json()["time"]["noise_ns"] is None


# ---- collectives and settings


def test_more_calls_and_bytes_are_found_by_line():
    first, second = simulate(is_ddp=False), simulate(is_ddp=False)
    for row in [row for row in second._rows["call"] if row["step"] >= 2]:
        second.call(
            row["rank"], "all_gather", row["end_ns"], row["end_ns"], nbytes=2000, site="cell line 9", step=row["step"]
        )
    changed = compare(recorded(first), recorded(second))
    assert [str(one) for one in changed.calls] == [
        "all_gather at cell line 9: 1 call instead of 0 of a rank in a step",
        "all_gather at cell line 9: 2.0 kB instead of 0 B of a rank in a step",
    ]
    larger = compared({"is_ddp": False}, {"is_ddp": False, "bucket_nbytes": 2 << 20})
    assert [str(one) for one in larger.calls] == [
        "all_reduce at cell line 7: 8.4 MB instead of 4.2 MB of a rank in a step"
    ]


def test_slower_transfers_of_the_same_size_are_found():
    changed = compared({"is_ddp": False}, {"is_ddp": False, "transfer_ms": 2.0})
    assert [str(one) for one in changed.calls] == ["all_reduce: 4.2 MB takes 8.00 ms instead of 4.00 ms"]


def test_moved_lines_are_no_finding():
    first, second = simulate(is_ddp=False), simulate(is_ddp=False)
    for row in second._rows["call"]:
        row["site"] = second._texts.setdefault("cell line 8", len(second._texts))
    second._tables.clear()
    assert not compare(recorded(first), recorded(second)).is_found


def test_settings_are_listed():
    changed = compared({}, {"samples": 64, "buckets": 2, "world_size": 2})
    assert [str(one) for one in changed.settings] == [
        "ranks: 2 instead of 4",
        "samples of a rank in a step: 64 instead of 32",
        "gradients in buckets of DDP in a step: 2.1 MB instead of 4.2 MB",
        "gradient buckets in a step: 2 instead of 4",
    ]


# ---- numbers


def with_values(changes: dict[tuple[int, int, str], float] | None = None, *, skips: range = range(0)) -> Recording:
    """Return a run of two ranks with a loss, a duration, and the contents of its blocking all-reduce.

    Args:
        changes: added to the value of a rank, a step, and "input", "output" or "loss".
        skips: steps without tensor values.
    """
    changes = changes or {}
    run = simulate(world_size=2, is_ddp=False)
    for row in list(run._rows["call"]):
        rank, step = row["rank"], row["step"]
        for side in ("input", "output") if step not in skips else ():
            value = 1.0 + step + changes.get((rank, step, side), 0.0)
            first = np.array([0.5, value], "<f4").tobytes().ljust(128, b"\0")
            run.add(
                "value",
                rank=rank,
                call=row["call"],
                side=SIDES.index(side),
                dtype="float32",
                name="",
                numel=2,
                looked_at=2,
                low=0.5,
                high=value,
                mean=(0.5 + value) / 2,
                nans=0,
                infs=0,
                first_count=2,
                first=np.void(first),
            )
        for name, value in {"loss": 1 / (1 + step), "seconds": float(np.random.default_rng().random())}.items():
            value += changes.get((rank, step, name), 0.0)
            run.add("metric", rank=rank, name=name, cell=1, step=step, value=value, time_ns=row["end_ns"])
    return recorded(run)


def test_equal_numbers_are_no_finding_and_a_logged_time_neither():
    numbers = compare(with_values(), with_values()).numbers
    assert not numbers.is_found and (numbers.tensors, numbers.metrics) == (80, 80)
    assert numbers.sentence == "All compared numbers are equal: 80 tensors and 80 metric values"
    assert [one.name for one in numbers.apart] == ["seconds"]


def test_the_first_differing_tensor_is_named_by_rank():
    changes = {(1, step, "input"): 1e-3 * (step - 6) for step in range(7, 20)}
    changes |= {(rank, step, "output"): 1.0 for rank in (0, 1) for step in range(7, 20)}
    numbers = compare(with_values(), with_values(changes)).numbers
    first = numbers.first
    assert first is not None and (first.kind, first.step, first.ranks, first.clean_step) == ("input", 7, (1,), 6)
    assert str(first) == (
        "the input of all_reduce (cell line 7) differs from step 7 on, on rank 1 of 2: 8 in A and 8.0010004 in B "
        "(element 1) on rank 1; recorded differences are up to 0.01 % of the tensor's largest value; in step 19 0.06 %"
    )


_CHANGE = NumberChange(
    kind="metric",
    name="loss",
    detail="",
    step=3,
    ranks=(0, 1),
    compared=(0, 1),
    before=1.0,
    after=1.1,
    what="value",
    share=0.5,
    last_step=3,
    last_share=0.5,
    clean_step=2,
    time_ns=0,
)


def test_several_ranks_share_one_percentage_of_a_metric():
    assert str(_CHANGE).endswith("1 in A and 1.1 in B on rank 0, up to 50 % apart")
    sizes = dataclasses.replace(_CHANGE, kind="input", name="all_gather", what="number of elements", share=1.0)
    assert str(sizes).endswith("1 in A and 1.1 in B (number of elements) on rank 0")


def test_a_difference_of_the_setup_hides_no_lack_of_gradients():
    found = Numbers(
        first=dataclasses.replace(_CHANGE, kind="input", name="all_gather", what="element 0"),
        others=(),
        apart=(),
        tensors=2,
        of_training=0,
        metrics=0,
        losses=0,
        lacking="B has no collective",
        left_out=False,
    )
    assert found.sentence.endswith(". No gradient was compared: B has no collective")


def test_a_differing_input_comes_before_an_earlier_result():
    """Rank 0 issues the collective first, with an equal input. Its result differs because of rank 1."""
    changes = {(rank, 7, "output"): 1.0 for rank in (0, 1)} | {(1, 7, "input"): 1.0}
    first, second = with_values(), with_values(changes)
    for recording in (first, second):
        rows = recording.store.rings["call"]._rows.view(recording.rows("call").dtype)
        rows["issue_ns"][rows["rank"] == 0] -= 1000
    found = compare(first, second).numbers.first
    assert found is not None and (found.kind, found.step, found.ranks) == ("input", 7, (1,))


def test_only_the_reduction_may_differ():
    numbers = compare(with_values(), with_values({(rank, 5, "output"): 0.25 for rank in (0, 1)})).numbers
    assert numbers.first is not None and numbers.first.only_result
    assert "its inputs are equal on all compared ranks, so only the reduction differs" in numbers.sentence


def test_an_interval_is_given_where_values_were_left_out():
    changes = {(0, step, "input"): 0.5 for step in range(9, 20)}
    numbers = compare(with_values(skips=range(6, 12)), with_values(changes)).numbers
    assert numbers.first is not None and (numbers.first.clean_step, numbers.first.step) == (5, 12)
    assert "differs first between steps 5 and 12, on rank 0 of 2" in numbers.sentence
    assert numbers.sentence.endswith("Values of more steps: %ddp_record all")


def test_a_nan_and_a_differing_loss():
    numbers = compare(with_values(), with_values({(1, 4, "loss"): float("nan")})).numbers
    assert numbers.first is not None and numbers.first.name == "loss" and numbers.first.share == np.inf
    assert json.dumps(compare(with_values(), with_values({(1, 4, "loss"): float("nan")})).to_json(), allow_nan=False)


def test_nothing_recorded_is_told():
    numbers = compared({}, {}).numbers
    assert not numbers.is_found and numbers.sentence.startswith("No number was compared: no metric and no value of a")


def without_gradients(*, in_b: bool = True, metrics: tuple[str, ...] = ()) -> Comparison:
    """Compare runs whose common collectives are those with which DDP sets up a model."""
    runs = []
    for has_gradients in (False, in_b):
        run = simulate(world_size=2, is_ddp=False)
        for row in list(run._rows["call"]):
            is_setup = row["step"] < 3
            row["origin"] = ORIGINS.index("ddp" if is_setup else "user")
            if is_setup:
                contents = {"numel": 2, "high": 1.0, "dtype": "float32", "name": "", "side": 0}
                run.add("value", rank=row["rank"], call=row["call"], **contents)
        if not has_gradients:
            run._rows["call"] = [row for row in run._rows["call"] if row["step"] < 3]
        run._tables.clear()
        for name in metrics:
            value = float(has_gradients and name != "loss")
            run.add("metric", rank=0, name=name, cell=1, step=5, value=value, time_ns=BEGIN_NS)
        runs.append(recorded(run))
    return compare(runs[0], runs[1])


def test_equal_tensors_of_the_setup_are_no_training():
    numbers = without_gradients().numbers
    assert (numbers.tensors, numbers.of_training) == (6, 0)
    assert numbers.sentence == (
        "No gradient and no loss was compared: A has no collective that could send gradients, such as all_reduce. Only "
        "tensors that DDP sends to set up a model or to copy its buffers were compared, and they are equal: 6 tensors"
    )
    both = without_gradients(in_b=False, metrics=("loss",)).numbers.sentence
    assert both.startswith("No gradient was compared: A and B have no collective that could send gradients")
    assert both.endswith("6 tensors and 1 metric value")


def test_a_metric_is_compared_with_tensors_of_the_training_only():
    """Equal tensors of the setup do not show that the training is equal, so a metric may be one of its numbers."""
    numbers = without_gradients(metrics=("rate",)).numbers
    assert numbers.first is not None and numbers.first.name == "rate" and numbers.apart == ()


def used_cores(own: float, busy: float, ready: float) -> Recording:
    """Return a run of two ranks on two cores.

    Args:
        own, busy: cores that each rank, and that all processes use.
        ready: share of the time in which a rank has no core.
    """
    run = simulate(world_size=2, steps=60, slow=0, phase="forward", extra_ms=10 * ready)
    for second in range(3):
        for rank in (0, 1):
            counted = {"ready_ns": ready, "ran_ns": own, "host_busy_ns": busy}
            row = {name: int(1e9 + second * 1e9 * share) for name, share in counted.items()}
            at_ns = BEGIN_NS + second * 10**9
            run.add("resource", rank=rank, time_ns=at_ns, cores=2, host_cores=2, gpu_allocated_bytes=-1, **row)
    return recorded(run)


@pytest.mark.parametrize(
    ("own", "busy", "cause"),
    [
        (0.25, 1.95, ": other processes used the cores"),
        (0.95, 1.95, ": the ranks themselves used all cores"),
        (0.2, 0.6, ""),  # the processes that used the cores are not known
    ],
)
def test_a_cause_of_a_lack_of_cores_is_named_if_it_was_measured(own, busy, cause):
    notes = compare(used_cores(own, busy, 0.1), used_cores(own, busy, 0.7)).time.notes
    # 1.4 s and 0.2 s of the 2 s between the samples, in 60 steps
    assert notes == (f"Rank 0 had no free core for up to 23.3 ms instead of 3.33 ms of a step{cause}",)


def test_a_short_run_uses_the_samples_around_it():
    def run(ready_ns: int, extra_ms: float) -> Recording:
        made = simulate(world_size=2, steps=20, slow=0, phase="forward", extra_ms=extra_ms)
        for rank in (0, 1):
            for at_ns, ready, busy in ((-(10**8), 0, 0), (2 * 10**9, ready_ns, 4 * 10**9)):
                counted = {"ready_ns": 1 + ready, "ran_ns": 1 + busy // 8, "host_busy_ns": 1 + busy}
                times = {"time_ns": BEGIN_NS + at_ns, "cores": 2, "host_cores": 2}
                made.add("resource", rank=rank, **times, gpu_allocated_bytes=-1, **counted)
        return recorded(made)

    assert compare(run(0, 0), run(0, 20)).time.is_found
    found = compare(run(0, 0), run(10**9, 20)).time  # other processes took 50 ms of each step
    assert not found.is_found and "other processes used the cores" in found.notes[0]


# ---- samples


def loaded(first: int = 0, since: int = 99, ranks: int = 2, rank: int = 1) -> Recording:
    """Return a run whose batches of a rank begin with another sample since a step."""
    run = simulate(world_size=ranks, steps=20)
    for own in range(ranks):
        for step in range(20):
            begin = 32 * (ranks * step + own) + (first if step >= since and own == rank else 0)
            row = {"count": 32, "first": begin, "last": begin + 31, "stride": 1}
            run.add("indices", rank=own, cell=1, step=step, name=LOADER, time_ns=BEGIN_NS + step * 10**7, **row)
    return recorded(run)


def test_the_first_batch_with_other_samples_is_named():
    assert not compare(loaded(), loaded()).samples.is_found
    assert compare(loaded(), loaded()).samples.compared == 40
    changed = compare(loaded(), loaded(first=7, since=11))
    assert changed.is_found and changed.samples.step == 11 and changed.samples.ranks == (1,)
    assert (
        "Input: The samples of DataLoader differ from step 11 on, on rank 1: samples 736 to 767 in A and "
        "samples 743 to 774 in B on rank 1." in str(changed).splitlines()
    )


# ---- names, files and the shell command


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    recorded(simulate(steps=30)).save(folder / "a.npz")
    recorded(simulate(steps=30, slow=1, phase="forward", extra_ms=10)).save(folder / "b.npz")
    return folder


def test_the_shell_command_fails_above_a_threshold(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    a, b, page, data = (
        str(path) for path in (files / "a.npz", files / "b.npz", tmp_path / "d.html", tmp_path / "d.json")
    )
    assert main(["diff", a, b, "--fail-above", "10%", "--json", data, "--html", page]) == 1
    shown = capsys.readouterr()
    assert (
        "Time: B is 10.0 ms slower than A per step (A: 34.5 ms, B: 44.5 ms, +29 %), because the forward of rank 1"
        in shown.out
    )
    assert shown.err == "\nB is 29 % slower than A, more than 10 %\n"
    assert json.loads(Path(data).read_text())["time"]["is_found"]
    assert "the forward of rank 1 takes 20.0 ms" in Path(page).read_text()
    assert main(["diff", a, b, "--fail-above", "30"]) == 0
    assert main(["diff", b, a, "--fail-above", "0%"]) == 0
    assert main(["diff", a, a, "--fail-above", "0%"]) == 0


def test_bad_input_of_the_shell_command(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    a = str(files / "a.npz")
    (tmp_path / "text.npz").write_text("no recording")
    for words in (
        ["diff"],
        ["diff", a],
        ["diff", a, str(files / "no.npz")],
        ["diff", a, str(tmp_path / "text.npz")],
        ["diff", a, str(tmp_path)],
        ["diff", a, "6"],
        ["diff", a, a, "--fail-above", "much"],
        ["diff", a, a, "--json", str(tmp_path / "no" / "d.json")],
        ["diff", a, a, "--other"],
    ):
        assert main(words) == 2, words
        assert capsys.readouterr().err, words
    assert main(["diff", "--help"]) == 0


def test_runs_are_named_by_their_cell(files: Path):
    recording = simulate_ranks(world_size=2, steps=40, straggler=1)
    recording.prompts.update({1: "In [6]", 2: "In [8]"})

    def now() -> Recording:
        return recording

    assert compare_named([], now).labels == compare_named(["6", "8"], now).labels == ("In [6]", "In [8]")
    # A is always the run that is named first, and the text names the base and an earlier B.
    assert str(compare_named(["6"], now)).startswith(
        "Changes from A, the base (In [6]), to B (In [8]).\nA: In [6], 20 "
    )
    last = compare_named(["8"], now)
    assert last.labels == ("In [8]", "In [6]")
    assert str(last).startswith(
        "Changes from A, the base (In [8]), to B (In [6], an earlier run).\nA: In [8], 20 steps"
    )
    assert last.time.sentence.startswith("B is ") and " faster than A per step (A: " in last.time.sentence
    assert not compare_named([], now).is_backward and last.to_json()["direction"] == last.direction
    path = str(recording.save(files / "two.npz"))
    assert compare_named([f"{path}:6", "8"], now).labels == ("two.npz, In [6]", "In [8]")
    assert compare_named([str(files / "a.npz")], now).direction == "Changes from A, the base (a.npz), to B (In [8])"
    with pytest.raises(UsageError, match=r"In \[7\] of the recording has no optimizer step; cells with steps: In \["):
        named("7", now)
    with pytest.raises(UsageError, match="a comparison needs two training runs, but the recording has 1 cell with"):
        compare_named([], lambda: recorded(simulate()))
    assert recording.compare(load(path), cell=1, other_cell=1).labels == ("In [6]", "the other recording, In [6]")


def test_texts_of_the_user_are_escaped(tmp_path: Path):
    run = simulate(world_size=2, is_ddp=False)
    other = simulate(world_size=2, is_ddp=False)
    for rank in (0, 1):
        for step in range(20):
            run.add(
                "metric", rank=rank, name="<img src=x onerror=alert(1)>", cell=1, step=step, value=0.0, time_ns=step
            )
            other.add(
                "metric", rank=rank, name="<img src=x onerror=alert(1)>", cell=1, step=step, value=1.0, time_ns=step
            )
    first, second = recorded(run), recorded(other)
    first.prompts[1] = "<script>\x1b[2J"
    changed = compare(first, second)
    assert changed.numbers.is_found and "\x1b" not in str(changed)
    text = changed.save_html(tmp_path / "d.html").read_text()
    assert "<img" not in text and "<script" not in text and "&lt;script&gt;" in text


@pytest.mark.alone
@pytest.mark.long
@pytest.mark.timeout(900)
def test_two_recordings_of_64_ranks_and_1000_steps_take_2_s():
    # A simulation has two cells, so the compared cell of each has 1,000 steps.
    first, second = (simulate_ranks(world_size=64, steps=2000, seed=seed) for seed in (0, 1))
    taken = []
    for _ in range(3):
        before = time.process_time()
        found = compare(first, second)
        taken.append(time.process_time() - before)
    assert found.runs[0].steps == found.runs[1].steps == 1000
    assert min(taken) < 2.0, taken
