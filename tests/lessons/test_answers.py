"""The questions of the notebooks from 04 on: right and wrong answers, and the explanations."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from ddp_notebook.errors import UsageError
from ddp_notebook.lessons import check
from ddp_notebook.lessons.questions import judging
from ddp_notebook.lessons.questions.catalogue import QUESTIONS
from ddp_notebook.lessons.questions.judging import Question, judge


@pytest.fixture(params=[2, 3, 4, 8])
def world_size(request, monkeypatch):
    """Simulate this number of ranks; only the number is used."""
    monkeypatch.setattr(judging, "_world_size", lambda: request.param)
    return request.param


def right(question: Question, world_size: int):
    return question.answer(world_size) if callable(question.answer) else question.answer


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_right_answer_is_right_and_others_are_not(name, world_size):
    question = QUESTIONS[name]
    answer = right(question, world_size)

    assert check(name, answer)
    assert repr(check(name, answer)) == f"right: {question.why}"
    if isinstance(answer, dict):
        for key in answer:
            verdict = check(name, {**answer, key: "something else"})
            assert not verdict and question.hint in repr(verdict)
            assert repr(verdict).startswith(f"not yet: look at {f'rank {key}' if isinstance(key, int) else key}. ")
            assert not check(name, {k: v for k, v in answer.items() if k != key})
            assert "dots" in repr(check(name, {**answer, key: ...}))
        assert not check(name, {**answer, 99: 0})
    else:
        assert not check(name, [answer])
        assert "dots" in repr(check(name, ...))


@pytest.mark.parametrize("name", [name for name, question in QUESTIONS.items() if question.traps])
def test_an_answer_that_is_easily_given_is_told_apart(name, world_size):
    question = QUESTIONS[name]
    traps = question.traps(world_size) if callable(question.traps) else question.traps
    for wrong, what in traps.items():
        assert repr(check(name, wrong)) == f"not yet: {what} {question.hint}"


def test_numbers_may_differ_a_little_and_arrays_are_lists():
    about = partial(judge, Question(answer=[1.0, 2.0], why="yes", hint="no"))
    assert about([1.000001, 2]) == (True, "yes")
    assert about(np.array([1.0, 2.0])) == (True, "yes")
    assert about([1.001, 2.0]) == (False, "no")
    assert about([1.0]) == about("1 2") == about(None) == about(True) == (False, "no")
    assert judge(Question(answer="nccl", why="yes", hint="no"), " NCCL ")[0]
    assert not judge(Question(answer=1, why="yes", hint="no"), True)[0]


def test_results_of_the_reduce_operations_are_those_of_numpy():
    for size in range(1, 17):
        numbers = np.arange(1, size + 1, dtype=object)
        wanted = {"MAX": numbers.max(), "MIN": numbers.min(), "PRODUCT": numbers.prod()}
        assert right(QUESTIONS["06/reduce-op"], size) == wanted


def test_without_ranks_the_message_says_what_to_do(monkeypatch):
    monkeypatch.setattr("ddp_notebook.session._current", None)  # other tests of this folder may have a running session
    monkeypatch.setattr(judging, "_last_world_size", None)
    with pytest.raises(UsageError, match=r"the answer depends on the number of ranks: start ranks with %ddp_start 4"):
        judge(QUESTIONS["04/neighbours"], 1)


def test_a_guess_may_follow_the_end_of_the_ranks(monkeypatch):
    monkeypatch.setattr("ddp_notebook.session._current", None)
    monkeypatch.setattr(judging, "_last_world_size", 3)
    assert judge(QUESTIONS["04/evens-and-odds"], {0: 4, 1: 2, 2: 4})[0]
