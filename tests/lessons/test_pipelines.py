"""The lesson about pipelines, on two real ranks: it shows the actions of the ranks."""

from __future__ import annotations

import re

import pytest

from ddp_notebook.errors import RankError, UsageError
from ddp_notebook.lessons.pipelines.pipeline import formula, pipeline
from ddp_notebook.lessons.pipelines.schedules import SCHEDULES


@pytest.fixture(scope="module")
def pipe(session):
    return pipeline()


@pytest.mark.long
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_runs_with_the_gradients_of_one_process(pipe, session, schedule):
    run = pipe.run(schedule, microbatches=4, stage_ms=1.0)
    stages = 1 if SCHEDULES[schedule][1] == "[rank]" else 2
    assert run.is_same and run.measured.schedule == SCHEDULES[schedule][0]
    assert (run.measured.stages, run.measured.microbatches) == (stages * session.world_size, 4)
    assert pipe.runs[-1] is run and run.name == f"{schedule}, 4 microbatches"
    assert schedule in run.picture().get_suptitle()


def test_one_f_one_b_keeps_less_and_has_the_same_bubble(pipe):
    gpipe = pipe.run("GPipe", microbatches=4)
    turns = pipe.run("1F1B", microbatches=4, guess=0.5)
    assert gpipe.in_flight == {0: 4, 1: 4} and turns.in_flight == {0: 2, 1: 1}
    assert gpipe.loss == pytest.approx(turns.loss)
    for run in (gpipe, turns):  # the backward of the first stage is shorter; sleeps take longer on a busy machine
        assert run.bubble >= run.ideal - 0.02  # a message may be sent a moment before its action ends
        assert run.even == pytest.approx(formula(2, 4))  # independent of the speed
        assert run.ideal == pytest.approx(formula(2, 4), abs=0.12)
    points = f"{abs(0.5 - turns.bubble) * 100:.0f} points off"
    assert points in repr(turns) and "guessed" not in repr(gpipe) and "gradients as in one process" in repr(turns)


def test_the_table_has_a_line_for_each_run(pipe):
    lines = pipe.table().splitlines()
    assert len(lines) == 1 + len(pipe.runs)
    assert re.fullmatch(r" +step +bubble +without messages +guess +kept at once", lines[0])
    assert re.search(r"1F1B, 4 microbatches +[\d.]+ m?s +\d+ % +\d+ % +50 % +2, 1$", lines[-1])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"schedule": "2F2B"}, r"schedule must be one of GPipe, 1F1B, Interleaved1F1B, "),
        ({"microbatches": 0}, r"microbatches must be 1 to 32, got 0"),
        ({"microbatches": 33}, r"microbatches must be 1 to 32, got 33"),
        ({"guess": 1.5}, r"guess must be a share of the time from 0 to 1, got 1\.5"),
        ({"stage_ms": 1000}, r"stage_ms must be 0 to 100, got 1000"),
    ],
)
def test_what_cannot_be_is_said(pipe, given, words):
    with pytest.raises(UsageError, match=words):
        pipe.run(**given)


def test_a_schedule_that_torch_refuses_raises_torchs_error(pipe):
    with pytest.raises(RankError, match=r"Number of microbatches \(1\) must be greater than"):
        pipe.run("1F1B", microbatches=1)
    assert pipe.run("GPipe", microbatches=1, stage_ms=0.0).is_same


def test_the_sliders_run_what_they_say_and_end_with_the_ranks(pipe):
    from ddp_notebook.lessons.pipelines.pipeline_sliders import PipelineSliders

    sliders = PipelineSliders(pipe)
    sliders.show()
    sliders.schedule.value, sliders.microbatches.value, sliders.guess.value = "1F1B", 3, 0.25
    sliders.button.click()
    assert (pipe.runs[-1].name, pipe.runs[-1].guess) == ("1F1B, 3 microbatches", 0.25)
    assert not sliders.button.disabled
    sliders.microbatches.value = 1
    assert "Number of microbatches (1)" in sliders.run()
    sliders._freeze()
    assert sliders.box.comm is None


def test_the_formula_of_the_literature():
    assert formula(4, 1) == 0.75 and formula(1, 8) == 0.0
    assert formula(4, 8) == pytest.approx(3 / 11)
