"""Exercises with a checked answer: checks an answer and explains the verdict."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddp_notebook.errors import UsageError
from ddp_notebook.lessons.language import translated
from ddp_notebook.lessons.questions import starters
from ddp_notebook.lessons.questions.answers_file import answers_file
from ddp_notebook.lessons.questions.catalogue import PUZZLES, QUESTIONS, unknown
from ddp_notebook.lessons.questions.judging import is_missing, judge
from ddp_notebook.lessons.questions.puzzles import has_dots, solve
from ddp_notebook.lessons.questions.starters import DOTS

_NAME = re.compile(r"\d\d/[\w-]+")
Judge = Callable[[Any], "tuple[bool, str] | bool | str"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict on an answer, with a reason. Its truth value is `is_right`."""

    is_right: bool
    reason: str

    def __bool__(self) -> bool:
        return self.is_right

    def __repr__(self) -> str:
        verdict = translated("right") if self.is_right else translated("not yet")
        return f"{verdict}{': ' * bool(self.reason)}{self.reason}"

    def _repr_html_(self) -> str:
        colour, mark = ("#009e73", "&#10003;") if self.is_right else ("#d55e00", "&#10007;")
        verdict = translated("right") if self.is_right else translated("not yet")
        reason = html.escape(self.reason)
        return (
            f'<div role="status" style="border-left:4px solid {colour};padding:4px 12px;margin:4px 0">'
            f"<b>{mark} {verdict}</b>{': ' * bool(reason)}{reason}</div>"
        )


def check(question: str | Judge | Any, answer: Any, *, keep: bool = True) -> Verdict:
    """Check an answer. A wrong answer raises no error.

    Args:
        question: One of: the name of a question or a puzzle; a function of the answer; the right answer itself
            (numbers, an array, or a mapping from rank to these). A function returns `(is_right, reason)` or
            `is_right`, or raises AssertionError with the reason.
        answer: Answer of the reader. For a puzzle it is a function of the notebook, or the name of one on the ranks:
            it runs on the ranks, and the recording decides whether it has reached the target.
        keep: Keep the verdict on an exercise or a puzzle for `lessons.progress`. False for a solution of the notebook.
            A wrong verdict on a puzzle is not kept while its code has a line with the dots of the notebook.

    Raises:
        UsageError: There is no question of this name.

    Example:
        >>> check({0: 6, 1: 6}, {0: 6, 1: 5})
        not yet: rank 1 has 6, not 5
    """
    if answer is None or answer is Ellipsis:
        return Verdict(False, translated("put your answer in place of the dots"))
    if isinstance(question, str) and question in PUZZLES:
        return _solved(question, answer, keep)
    if isinstance(question, str) and question in QUESTIONS:
        return _judged(question, answer, keep)
    if isinstance(question, str) and (not isinstance(answer, str) or _NAME.fullmatch(question)):
        raise UsageError(unknown(question))
    if not callable(question):
        return _compare(question, answer)
    try:
        said = question(answer)
    except AssertionError as error:
        return Verdict(False, str(error))
    except Exception as error:  # the type of the answer is not supported
        return Verdict(False, f"{type(answer).__name__} is not an answer here ({error})")
    if isinstance(said, tuple):
        return Verdict(bool(said[0]), said[1])
    if isinstance(said, str):
        return Verdict(False, said)
    return Verdict(True if said is None else bool(said), "")


def _judged(name: str, answer: Any, keep: bool) -> Verdict:
    """Judge the answer to a question of a lesson. Keep it only if the question is an exercise: those that `lessons.ask`
    asks keep guesses only."""
    question = QUESTIONS[name]
    is_right, reason = judge(question, answer)
    if question.is_asked or is_missing(answer):
        return Verdict(is_right, reason)
    if keep and not is_right and (advice := starters.advice(name)):
        return Verdict(False, _in_words(advice))
    if keep:
        answers_file().add(name, question.in_words(answer), (is_right, reason))
    return Verdict(is_right, reason)


def _solved(name: str, solution: object, keep: bool) -> Verdict:
    """Run and judge the solution of a puzzle, and keep the verdict if asked."""
    function = solution if isinstance(solution, str) else getattr(solution, "__name__", "")
    if keep and starters.has_function(name, function) and (advice := starters.advice(name)):
        return Verdict(False, _in_words(advice))
    is_right, reason = solve(PUZZLES[name], solution)
    if reason == DOTS:
        return Verdict(False, _in_words(DOTS))
    if keep and (is_right or not has_dots(solution)):
        answers_file().add(name, getattr(solution, "__name__", str(solution)), (is_right, reason))
    return Verdict(is_right, reason)


def _in_words(advice: str) -> str:
    """Return the advice about a starter in the language of the notebook."""
    if advice == DOTS:
        return translated("put your code in place of the dots")
    return translated("change the code of this exercise, and run its cells again")


def _compare(right: Any, answer: Any) -> Verdict:
    if isinstance(right, Mapping):
        if not isinstance(answer, Mapping):
            return Verdict(False, f"a value for each of the ranks {list(right)} is needed: {{0: ..., 1: ...}}")
        for rank, value in right.items():
            if rank not in answer:
                return Verdict(False, f"rank {rank} is missing")
            if not _same(value, answer[rank]):
                return Verdict(False, f"rank {rank} has {_short(value)}, not {_short(answer[rank])}")
        return Verdict(True, "")
    if _same(right, answer):
        return Verdict(True, "")
    return Verdict(False, f"it is {_short(right)}, not {_short(answer)}")


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, str) or isinstance(other, str):
        return isinstance(one, str) and isinstance(other, str) and one.strip().lower() == other.strip().lower()
    if isinstance(one, Sequence) and not all(isinstance(value, int | float) for value in one):
        return isinstance(other, Sequence) and list(one) == list(other)
    try:
        first, second = np.asarray(one, np.float64), np.asarray(other, np.float64)
    except (TypeError, ValueError):
        return bool(one == other)
    return first.shape == second.shape and bool(np.allclose(first, second, rtol=1e-5, atol=1e-8))


def _short(value: Any) -> str:
    return str(value.tolist() if isinstance(value, np.ndarray | np.generic) else value)
