"""Guesses of the reader: finds their question, reads them, and keeps them. Also the choices as a text."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from ddp_notebook.errors import UsageError
from ddp_notebook.lessons.language import translated
from ddp_notebook.lessons.questions import results
from ddp_notebook.lessons.questions.answers_file import answers_file
from ddp_notebook.lessons.questions.catalogue import QUESTIONS, unknown
from ddp_notebook.lessons.questions.judging import Question, is_missing, judge

SHOW_ME = "show me"
_ARITHMETIC = (
    *(ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Dict, ast.UnaryOp, ast.BinOp, ast.Load),
    *(ast.operator, ast.unaryop),
)


def find(name: str) -> Question:
    """Return the question of this name.

    Raises:
        UsageError: There is none, or it is an exercise.
    """
    question = QUESTIONS.get(name)
    if question is None:
        raise UsageError(unknown(name))
    if not question.is_asked:
        raise UsageError(f"{name!r} is an exercise: check your result with lessons.check({name!r}, ...)")
    return question


def keep(name: str, answer: Any) -> str:
    """Keep a guess, and update the displayed results. Return a sentence for the reader.

    Raises:
        UsageError: The answer is not among the choices, or a part of it is missing.
    """
    question = find(name)
    if isinstance(answer, str) and answer.strip().lower() == SHOW_ME:
        answers_file().show(name)
        results.update(name)
        return translated("The result is no longer hidden.")
    chosen = _chosen(question, answer)
    in_words = question.in_words(chosen)
    answers_file().add(name, in_words, judge(question, chosen))
    results.update(name)
    return f"{translated('Your guess is kept:')} {question.in_words(chosen, translated)}."


def _chosen(question: Question, answer: Any) -> Any:
    """Replace displayed texts of choices by their answers. Check that no part is missing."""
    right = question.right()
    if isinstance(right, Mapping):
        given = answer if isinstance(answer, Mapping) else {}
        if missing := [key for key in right if is_missing(given.get(key, ...))]:
            raise UsageError(f"give an answer for each of {', '.join(map(str, right))}; missing: {missing[0]}")
        return {key: _choice(question, value) for key, value in given.items()}
    if is_missing(answer):
        raise UsageError("put your answer in place of the dots")
    return _choice(question, answer)


def _choice(question: Question, answer: Any) -> Any:
    choices = question.labelled_choices()
    if not choices:
        return answer
    for label, value in choices.items():
        labels = {label.lower(), translated(label).lower()}
        is_label = isinstance(answer, str) and answer.strip().lower() in labels
        if is_label or (type(answer) is type(value) and answer == value):
            return value
    raise UsageError(f"the answer must be one of {', '.join(map(repr, choices))}, got {answer!r}")


def value_of(text: str, right: Any) -> Any:
    """Return the value of a text in a field. It is a Python value or arithmetic, unless the right answer is a text.

    Raises:
        UsageError: The text is empty, or it is not a Python value.

    Example:
        >>> value_of("2 * 7 / 8 * 400", 700)
        700.0
        >>> value_of("nccl", "gloo")
        'nccl'
    """
    if not (text := text.strip()):
        raise UsageError("write your answer into the field")
    if isinstance(right, str):
        return text
    try:
        tree = ast.parse(text, mode="eval")
        if not all(isinstance(node, _ARITHMETIC) for node in ast.walk(tree)):
            raise ValueError
        return eval(compile(tree, "<answer>", "eval"), {"__builtins__": {}})
    except Exception:
        raise UsageError(f"{text!r} is not a Python value such as 3, 0.5 or [0, 1]") from None


def in_text(name: str, question: Question) -> str:
    """Return the choices of a question, and how to answer without widgets."""
    right, choices = question.right(), question.labelled_choices()
    lines = [f"  {translated(label)}" for label in choices]
    example = repr(translated(next(iter(choices)))) if choices else question.placeholder
    if isinstance(right, Mapping):
        head = translated("for each of:") if lines else translated("An answer for each of:")
        lines = [*lines, head, *(f"  {key}" for key in right)]
        first = next(iter(right))
        example = f"{{{first!r}: {example}, ...}}"
    elif not choices and isinstance(right, str):
        example = repr(example)
    if choices:
        lines = [translated("One of:"), *lines]
    return "\n".join(
        [
            *lines,
            f"{translated('Guess:')}       lessons.ask({name!r}, {example})",
            f"{translated('Or give up:')}  lessons.ask({name!r}, {SHOW_ME!r})",
            *([said] if (said := already(name)) else []),
        ]
    )


def already(name: str) -> str:
    """Return a sentence about earlier guesses; "" if there are none."""
    answered = answers_file().of(name)
    if answered.guesses:
        return f"{translated('Your first guess:')} {translated(answered.guesses[0].answer)}."
    return translated("You have requested the result.") if answered.is_shown else ""
