"""Capstones: each broken program is judged as broken, and its repair as right; plans follow the published formulas."""

from __future__ import annotations

from inspect import getsource

import pytest

from ddp_notebook import lessons
from ddp_notebook.errors import UsageError
from ddp_notebook.lessons.capstones.programs import PROGRAMS
from ddp_notebook.lessons.questions.catalogue import QUESTIONS
from tests.lessons import solutions

QUICK = [5, 8]  # programs that end, of which `make test` runs some
HANGING = [1, 2, 3, 12]


@pytest.mark.processes
@pytest.mark.parametrize(
    "number", [pytest.param(number, marks=[] if number in QUICK else pytest.mark.long) for number in PROGRAMS]
)
def test_a_broken_program_is_judged_before_and_after_its_repair(session, number, capsys):
    bug = lessons.bug(number)
    bug.run()
    assert ("CellTimeoutError" in capsys.readouterr().out) == (number in HANGING)
    assert not bug.check()
    bug.repair()
    assert bug.check(), bug.check()
    assert "Error" not in capsys.readouterr().out.replace("Error code", "")


@pytest.mark.processes
def test_a_repair_of_another_program_does_not_count(session):
    lessons.bug(8).repair()
    session.run("pass")
    assert repr(lessons.bug(9).check()).startswith("not yet: run your repaired program in a cell")


def test_each_program_differs_from_its_repair_and_has_a_question():
    assert list(PROGRAMS) == list(range(1, 13))
    for number, program in PROGRAMS.items():
        assert f"27/bug-{number:02}" in QUESTIONS
        for old, new in program.repairs:
            assert program.code.count(old) == 1 and old != new
        assert program.source.startswith("https://")
        assert program.report in repr(lessons.bug(number)) and "judge" not in lessons.bug(number)._repr_html_()


def test_an_unknown_number_of_a_program():
    with pytest.raises(UsageError, match="a bug has a number from 1 to 12, got 13"):
        lessons.bug(13)


# ---- plans


def test_bytes_of_a_plan():
    plan = lessons.plan(shard=2, tensor=8, recompute=True)
    parameters = 80 * (2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28_672 + 2 * 8192) + 2 * 128_256 * 8192 + 8192
    assert plan.model.parameters == parameters
    state, gathered, activations, logits = (line.value for line in plan.memory())
    assert state == 16 * parameters / 16
    assert gathered == pytest.approx(2 * (3 * 855_654_400 + 2_101_354_496) / 8, rel=1e-3)
    assert activations == (2 * 80 + 34) * 8192 * 8192 / 8  # bytes of a token and a hidden unit
    assert logits == 8 * 8192 * 128_256 / 8
    assert plan.fits and plan.nbytes == state + gathered + activations + logits


def test_time_of_a_plan():
    tokens = 128 * 8192
    plan = lessons.plan(tensor=8, pipeline=2)
    operations = 6 * plan.model.parameters * tokens + 6 * 80 * 8192 * 8192 * tokens
    assert plan.compute_s == pytest.approx(operations / (16 * 989e12 * 0.55))
    one_s = 2 * (2 * 8192 * 8192) * 7 / 8 / 450e9  # an all-reduce of the activations over NVLink
    by_name = {line.name: line.value for line in plan.time()}
    assert by_name["tensor parallel, exposed"] == pytest.approx(4 * one_s * 40 * 128)
    assert by_name["pipeline bubble"] == pytest.approx((plan.compute_s + 4 * one_s * 40 * 128) / 128)
    assert plan.tokens_per_s == pytest.approx(tokens / plan.step_s)
    assert plan.mfu == pytest.approx(0.55 * plan.compute_s / plan.step_s)


def test_recomputation_costs_a_third_and_is_not_useful():
    kept, again = lessons.plan(shard=16), lessons.plan(shard=16, recompute=True)
    assert again.compute_s == pytest.approx(4 / 3 * kept.compute_s)
    assert kept.mfu == pytest.approx(0.55) and again.mfu == pytest.approx(0.55 * 3 / 4)
    assert again.nbytes < kept.nbytes


@pytest.mark.parametrize(("size", "stride", "gb_s"), [(8, 1, 450), (16, 1, 400), (2, 8, 50), (4, 4, 100), (2, 4, 450)])
def test_bandwidth_of_a_group_across_nodes(size, stride, gb_s):
    assert lessons.plan(shard=16).cluster.bandwidth_gb_s(size, stride) == gb_s


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"shard": 8}, "the mesh must have 16 GPUs; replicate 1 x shard 8 x tensor 1 x pipeline 1 = 8"),
        ({"shard": 16, "microbatch": 0}, "microbatch must be at least 1, got 0"),
        ({"shard": 16, "microbatch": 3}, "128 sequences cannot be divided by 16"),
    ],
)
def test_an_impossible_plan(choice, message):
    with pytest.raises(UsageError, match=message):
        lessons.plan(**choice)


def test_a_plan_as_a_table():
    plan = lessons.plan(shard=16)
    assert "does not fit: 4 GB must stay free" in repr(plan)
    assert plan._repr_html_().count("<tr>") == 11 and 'href="https://arxiv.org/abs/1910.02054"' in plan._repr_html_()


def test_a_program_needs_a_notebook_to_be_edited():
    with pytest.raises(UsageError, match="needs a notebook"):
        lessons.bug(5).edit()


# ---- overlap


@pytest.mark.processes
def test_a_picture_of_the_overlap(session):
    """Without hooks nothing is hidden."""
    flat, _ = solutions.PAIRS["25/overlap"]
    code = f"{getsource(flat)}\nfrom ddp_notebook.lessons.capstones.ranks import timeline_of\nstep = timeline_of(Flat)"
    session.run(code, quiet=True)
    for step in session["step"].values():
        [(first, last)] = step["transfers"]
        assert 60 < step["backward"] <= first < last <= step["end"] and last - first > 50
    picture = lessons.overlap("Flat")
    assert [label.get_text() for label in picture.axes[0].get_yticklabels()] == ["Flat"]
    assert picture.legends[0].get_texts()[0].get_text() == "backward"


def test_a_picture_of_no_class():
    with pytest.raises(UsageError, match="name at least one class"):
        lessons.overlap()
