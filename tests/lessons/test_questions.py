"""Exercises with a checked answer."""

from __future__ import annotations

import numpy as np
import pytest

from ddp_notebook import lessons
from ddp_notebook.errors import UsageError
from ddp_notebook.lessons.questions.catalogue import QUESTIONS
from ddp_notebook.lessons.questions.judging import Question


@pytest.mark.parametrize(
    ("right", "answer", "words"),
    [
        (6, 6, "right"),
        (6, 6.0, "right"),
        (6, 5, "not yet: it is 6, not 5"),
        ({0: 6, 1: 6}, {0: 6, 1: 6}, "right"),
        ({0: 6, 1: 6}, {0: 6, 1: 5}, "not yet: rank 1 has 6, not 5"),
        ({0: 6, 1: 6}, {0: 6}, "not yet: rank 1 is missing"),
        ({0: 6}, 6, "not yet: a value for each of the ranks [0] is needed: {0: ..., 1: ...}"),
        (np.array([1, 2]), [1, 2], "right"),
        ([1, 2], [1, 2, 3], "not yet: it is [1, 2], not [1, 2, 3]"),
        ("gloo", " Gloo", "right"),
        (6, ..., "not yet: put your answer in place of the dots"),
        (lambda answer: (answer > 3, "more than three"), 4, "right: more than three"),
        (lambda answer: (answer > 3, "more than three"), "x", "not yet: str is not an answer here"),
    ],
)
def test_an_answer_is_judged_in_words(right, answer, words):
    verdict = lessons.check(right, answer)
    assert repr(verdict).startswith(words)
    assert bool(verdict) == words.startswith("right")
    assert ("&#10003;" in verdict._repr_html_()) == bool(verdict)


def test_an_exercise_may_assert():
    def judge(answer):
        assert answer % 2 == 0, "it has to be even"

    assert lessons.check(judge, 2)
    assert repr(lessons.check(judge, 3)).startswith("not yet: it has to be even")


def test_questions_have_names(monkeypatch):
    monkeypatch.setitem(QUESTIONS, "test_sum", Question(answer=3, why="1 + 2", hint="add them up"))
    assert repr(lessons.check("test_sum", 3)) == "right: 1 + 2"
    assert repr(lessons.check("test_sum", 4)) == "not yet: add them up"
    with pytest.raises(UsageError, match=r"^unknown question 'test_product'; there are test_sum$"):
        lessons.check("test_product", 3)
    with pytest.raises(UsageError, match=r"^unknown question '04/box'; there are 04/backend, .*, 04/world-size$"):
        lessons.check("04/box", 3)
    with pytest.raises(UsageError, match=r"^unknown question '07/rng'; there are 07/half, "):
        lessons.check("07/rng", "my_all_reduce")
