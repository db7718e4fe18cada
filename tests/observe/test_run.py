"""The numbers of a training run are the same in all outputs."""

from __future__ import annotations

import numpy as np
import pytest

from ddp_notebook.observe.recording import Recording
from ddp_notebook.observe.report.report import report
from ddp_notebook.observe.steps.run import counted, run_of, runs
from ddp_notebook.observe.steps.steps import steps
from ddp_notebook.observe.views import WARM_UP
from ddp_notebook.records.schema import SPANS
from ddp_notebook.records.units import ms
from ddp_notebook.widgets.feed.feed import Feed
from ddp_notebook.widgets.html import page
from ddp_notebook.widgets.live_status import LiveStatus
from ddp_notebook.widgets.still import saved_summary
from tests.observe.synthetic import BEGIN_NS, MS, Synthetic, simulate


def recorded(**options) -> Recording:
    recording = Recording(options.get("world_size", 4))
    for batch in simulate(**options).batches():
        recording._feed(batch)
    return recording


@pytest.mark.parametrize("seed", range(3))
def test_every_display_shows_the_numbers_of_the_run(seed):
    pytest.importorskip("pandas")
    recording = recorded(world_size=2, steps=25, noise_ms=8, between_ms=7, seed=seed)
    recording.prompts[1] = "In [6]"
    (run,) = recording.runs()

    assert (run.label, run.steps, run.ranks, run.gradient_nbytes) == ("In [6]", 25, 2, 4 << 20)
    number, words = f"{ms(run.step_ns)}/step", f"{ms(run.step_ns)}/step ({run.definition})"
    assert str(recording.report()).startswith(f"In [6]: 25 steps on 2 ranks, {words}, ")
    overall = recording.report().overall
    assert overall is not None and overall.step_ns == pytest.approx(run.step_ns, rel=1e-12)
    assert saved_summary.text(recording).startswith(
        "In [6]: 2 ranks, 25 steps, "
    ) and f", {number}, " in saved_summary.text(recording)
    head = LiveStatus(Feed(recording, is_live=False), None, "2 ranks").head()
    assert (head["label"], head["training"]["per_step"], head["training"]["steps"]) == ("In [6]", number, 25)
    drawn = page.of_recording(recording, None, "2 ranks", "k")
    assert f"<b>{number}</b>" in drawn and run.definition in drawn and "In [6]" in drawn
    frame, own = recording.to_pandas("run"), recording.to_pandas()
    assert frame.loc[0, ["label", "steps", "definition"]].tolist() == ["In [6]", 25, run.definition]
    assert frame.loc[0, "ms_per_step"] == run.step_ns / 1e6
    assert own[own.is_in_mean].duration_ns.mean() == pytest.approx(run.step_ns) and set(own.label) == {"In [6]"}
    assert set(recording.to_pandas("span").label) == {"In [6]"}


@pytest.mark.slow
def test_the_mean_is_that_of_its_definition():
    run = simulate(world_size=3, steps=45, noise_ms=5)
    found = run_of(run)
    assert found is not None
    of_number = {
        number: np.mean([step.duration_ns for step in steps(run) if step.step == number]) for number in range(2, 45)
    }
    middle = sorted(of_number.values())[3:-3]
    assert found.definition == "mean of steps 2 to 44 without the 3 shortest and 3 longest, of 3 ranks"
    assert found.step_ns == pytest.approx(np.mean(middle))


def test_one_step_is_its_own_mean():
    (found,) = runs(simulate(world_size=1, steps=1))
    assert found.definition == "step 0" and found.counted == "1 step"
    assert counted(np.array([0]), np.array([7]))[0].tolist() == [0] and WARM_UP == 2


def test_a_mean_over_one_step_names_it():
    """The mean of steps 2 to 4 leaves out the shortest and the longest."""
    run = simulate(world_size=2, steps=5, noise_ms=5)
    found = run_of(run)
    durations = {
        number: np.mean([step.duration_ns for step in steps(run) if step.step == number]) for number in range(2, 5)
    }
    middle = sorted(durations, key=lambda number: durations[number])[1]
    assert found is not None and found.definition == f"step {middle}, mean of 2 ranks"
    assert found.step_ns == pytest.approx(durations[middle])
    alone = run_of(simulate(world_size=1, steps=3))
    assert alone is not None and alone.definition == "step 2"


def test_without_steps_there_is_no_run():
    assert run_of(Synthetic(2)) is None and runs(Synthetic(2)) == []
    assert run_of(simulate(cell=3), cell=2) is None


def paused(cell: str = "In [6]") -> Synthetic:
    """Return two epochs of ten steps of 20 ms. An evaluation of 100 ms and a checkpoint of 50 ms follow each epoch.

    Args:
        cell: Prompt of the cell; "" for a script, which has no cell.
    """
    run, now = Synthetic(1), 0.0

    def span(kind: str, name: str, lasts: float) -> None:
        nonlocal now
        begin, now = now, now + lasts
        run.span(0, kind, name, int(BEGIN_NS + begin * MS), int(BEGIN_NS + now * MS))

    for _ in range(2):
        span("workers", "Train", 5)
        for _ in range(10):
            span("input", "Train", 1)
            span("forward", "Net", 6)
            span("backward", "", 10)
            span("optimizer", "SGD", 3)
        now += 2
        for _ in range(4):
            span("input", "Test", 5)
            span("evaluation", "Net", 20)
        span("workers", "Test", 1)
        span("checkpoint", "torch.save", 50)
        now += 4
    if cell:
        run.span(0, "cell", cell, BEGIN_NS, int(BEGIN_NS + now * MS))
    return run


def test_evaluation_and_checkpoints_belong_to_no_step():
    run = paused()
    found = steps(run)

    assert {step.duration_ns // MS for step in found} == {20, 25}, "the first step of an epoch starts the workers"
    assert found[10].workers_ns == 5 * MS and found[10].input_ns == 6 * MS
    typical = run_of(run)
    assert typical is not None and typical.step_ns == 20 * MS
    outside = report(run).outside
    assert outside is not None and outside.cell_ns == sum(step.duration_ns for step in found) + 2 * 157 * MS
    assert {name: (times, round(ns / MS)) for name, times, ns in outside.rows} == {
        "evaluation": (2, 202),
        "checkpoints": (2, 100),
        "other time between steps": (0, 6),
        "after the last step": (0, 6),
    }


def of_few_starts() -> Synthetic:
    """Return four epochs of 32 steps of 10 ms. Workers start for 300 ms in the first step of each; the last end is
    later."""
    run, now = Synthetic(1), 0
    for _ in range(4):
        for batch in range(32):
            for kind, name, lasts in (
                ("input" if batch else "workers", "DataLoader 2", 1 if batch else 301),
                ("forward", "Net", 3),
                ("backward", "", 5),
                ("optimizer", "SGD", 1),
            ):
                samples = 8 if kind in ("input", "workers") else -1
                run.span(0, kind, name, BEGIN_NS + now * MS, BEGIN_NS + (now + lasts) * MS, samples=samples)
                now += lasts
        run.span(0, "workers", "DataLoader 2", BEGIN_NS + now * MS, BEGIN_NS + (now + 20) * MS)
        now += 20
    run.span(0, "cell", "In [6]", BEGIN_NS, BEGIN_NS + now * MS)
    run.add("loader", rank=0, time_ns=BEGIN_NS, name="DataLoader 2", cell=1, workers=2, batches=32, prefetch=2)
    return run


def test_rows_of_a_cell_add_up_and_include_rare_worker_starts():
    run = of_few_starts()
    found = report(run)
    assert found.run is not None and found.overall is not None and found.outside is not None
    assert found.run.step_ns == 10 * MS and not found.overall.workers_ns, "the longest steps are not in the mean"
    assert found.outside.cell_ns == sum(found.outside.whole_ns) == 2560 * MS
    assert {(name, times, round(ns / MS)) for name, times, ns in found.outside.steps} == {
        ("steps in the mean", 112, 1120),
        ("steps not in the mean", 16, 1420),
        ("  start and end of workers", 4, 1264),
    }
    assert list(found.outside.rows) == [("workers outside of steps", 1, 20.0 * MS)]
    assert found.verdict == (
        "50 % of the time of all steps is the start and the end of the data loader's workers, in 4 of 128 steps"
    )
    assert found.suggestions[0] == (
        "persistent_workers=True in DataLoader(num_workers=2): its workers start again and end, in each of 4 epochs of "
        "32 batches, which takes 1.28 s of the cell's 2.56 s"
    )
    assert str(found).endswith(
        """
time of the cell            times     s  share
steps in the mean             112  1.12   44 %
steps not in the mean          16  1.42   55 %
  start and end of workers      4  1.26   49 %
workers outside of steps        1  0.02  0.8 %"""
    )


def test_workers_without_time_outside_of_steps_are_not_listed():
    """With persistent_workers each epoch ends with a span of some microseconds."""
    run = of_few_starts()
    end_ns = BEGIN_NS + 2560 * MS
    for row in run._rows["span"]:
        if row["end_ns"] == end_ns and row["kind"] == SPANS.index("workers"):
            row["end_ns"] -= int(19.9 * MS)
    assert "workers outside of steps" not in str(report(run))


def test_one_epoch_is_not_told_to_keep_its_workers():
    """A single epoch starts its workers once in any case."""
    run, more = Synthetic(1), of_few_starts()
    end = BEGIN_NS + 640 * MS
    for row in more._rows["span"]:
        if row["end_ns"] <= end:
            run._rows["span"].append(row)
    run._rows["loader"], run._texts = more._rows["loader"], more._texts
    assert not any("persistent_workers" in text for text in report(run).suggestions)


def test_a_script_has_its_last_evaluation_and_checkpoint_too():
    outside = report(paused(cell="")).outside
    assert outside is not None
    rows = {name: (times, round(ns / MS)) for name, times, ns in outside.rows}
    assert rows["evaluation"] == (2, 202) and rows["checkpoints"] == (2, 100)
    assert rows["after the last step"] == (0, 2), "up to the end of the checkpoint"


STEP = "load Train 1, train Net 4, back 8, step SGD 2"  # 15 ms
EVALUATIONS = {
    "no_grad without eval": "load Test 3, no_grad Net 7",
    "no_grad and eval": "load Test 3, eval+no_grad Net 7",
    "eval without no_grad": "load Test 3, eval Net 7",
    "no_grad without eval, without a loader": "wait 3, no_grad Net 7",
    "a model that does not train": "load Test 3, eval+no_grad Ema 7",
    "no_grad over the loader of the training": "load Train 3, no_grad Net 7",
}


def run_of_words(words: str, repeats: int = 1) -> Synthetic:
    """Return a run of one rank whose cell has these sequential spans: kind, name and time in ms."""
    run, now = Synthetic(1), BEGIN_NS
    for one in (words.split(", ")) * repeats:
        what, *name, lasts = one.split()
        begin, now = now, now + int(lasts) * MS
        kind = {
            **{"load": "input", "train": "forward", "eval": "forward", "back": "backward", "step": "optimizer"},
            **{"no_grad": "evaluation", "eval+no_grad": "evaluation", "save": "checkpoint"},
        }.get(what, what)
        if what != "wait":
            run.span(0, kind, name[0] if name else "", begin, now, is_training=what in ("train", "no_grad"))
    run.span(0, "cell", "In [6]", BEGIN_NS, now)
    return run


@pytest.mark.parametrize("evaluation", EVALUATIONS.values(), ids=EVALUATIONS)
@pytest.mark.parametrize("where", ["between", "before", "middle"])
def test_forwards_of_an_evaluation_are_in_no_step(evaluation, where):
    pause, epoch = ", ".join([evaluation] * 3 + ["save Net 20"]), ", ".join([STEP] * 8)
    words = {
        "between": ", ".join([epoch, pause] * 3),  # the last pause comes after the last step
        "before": ", ".join([pause, epoch, pause, epoch]),
        "middle": ", ".join([STEP, STEP, STEP, pause, epoch, pause, STEP]),
    }[where]
    run = run_of_words(words)
    found, outside = steps(run), report(run).outside

    lasted = [step.duration_ns // MS for step in found]
    assert set(lasted) == {15} and {step.input_ns // MS for step in found} == {1}
    assert outside is not None and sum(outside.whole_ns) == outside.cell_ns
    rows = {name: (times, round(ns / MS)) for name, times, ns in outside.rows}
    count, spent = words.count("save"), 27 if "wait" in evaluation else 30
    assert rows["evaluation"] == (count, spent * count)
    assert rows["checkpoints"] == (count, 20 * count)
    recording = Recording(1)
    for batch in run.batches():
        recording._feed(batch)
    shown = Feed(recording, is_live=False).kept("step")
    assert shown["duration"].round(3).tolist() == pytest.approx(lasted), "the live monitor has the same steps"


@pytest.mark.parametrize(
    ("words", "lasts"),
    [
        ("load Train 1, no_grad Teacher 4, train Net 4, back 8, step SGD 2", 19),
        ("load A 1, no_grad Teacher 4, load B 1, train Net 4, back 8, step SGD 2", 20),
        ("load Train 1, no_grad G 3, train D 4, back 8, step D 2, train G 3, train D 4, back 8, step G 2", 35),
        ("load Train 1, no_grad Net 4, train Net 4, back 8, step SGD 2", 19),  # pseudo-labels of the same batch
        ("load Train 1, eval Net 4, back 8, step SGD 2", 15),  # with frozen statistics
        ("load A 1, eval Net 4, load B 1, eval Net 4, back 8, step SGD 2", 20),
        ("load A 1, load B 1, train Net 4, back 8, step SGD 2", 16),
        ("load A 1, train Net 4, no_grad Net 3, back 8, save Net 5, step SGD 2", 23),
    ],
)
def test_forwards_without_gradients_count_in_their_step(words, lasts):
    run = run_of_words(words, repeats=9)
    outside = report(run).outside
    assert {step.duration_ns // MS for step in steps(run)[1:]} == {lasts}
    assert outside is not None and "evaluation" not in dict.fromkeys(name for name, *_ in outside.rows[:1])
    assert sum(outside.whole_ns) == outside.cell_ns
    saved = sum(times for name, times, _ in outside.steps if name == "  checkpoints")
    assert saved == 9 * words.count("save"), "saves inside steps are counted"


def test_an_evaluation_with_unrecorded_forwards_is_in_no_step():
    """For `model.module` without DDP, only the batches are recorded."""
    run = run_of_words(", ".join([*[STEP] * 8, *["load Test 3, wait 7"] * 4]), repeats=3)
    assert {step.duration_ns // MS for step in steps(run)} == {15}


def test_evaluation_of_a_teacher_model_is_a_part_of_the_step():
    run = Synthetic(1)
    for at in (0, 100, 200):
        for kind, name, begin, end in (
            ("evaluation", "Teacher", 0, 30),
            ("forward", "Net", 30, 50),
            ("backward", "", 50, 90),
            ("optimizer", "SGD", 90, 100),
        ):
            run.span(0, kind, name, BEGIN_NS + (at + begin) * MS, BEGIN_NS + (at + end) * MS)
    assert [(step.duration_ns // MS, step.compute_ns // MS) for step in steps(run)] == [(100, 90)] * 3


def test_the_live_monitor_has_the_same_steps():
    recording = Recording(1)
    for batch in paused().batches():
        recording._feed(batch)
    feed = Feed(recording, is_live=False)
    shown = feed.kept("step")
    assert sorted(shown["duration"].round(3).tolist()) == sorted(step.duration_ns / 1e6 for step in recording.steps())
