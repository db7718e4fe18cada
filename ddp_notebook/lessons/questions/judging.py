"""Judges answers to the questions of the notebooks: right or wrong, with a reason."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Any

from ddp_notebook.errors import UsageError
from ddp_notebook.lessons.language import translated
from ddp_notebook.records.words import name_ranks

_last_world_size: int | None = None

Choices = Sequence[Any] | Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question of a notebook.

    Args:
        answer: Right answer, or a function that returns it for a number of ranks. A mapping from rank is compared rank
            by rank.
        why: Explanation for a right answer.
        hint: Explanation for a wrong answer.
        traps: Likely wrong answers, each with an explanation; a function of the number of ranks if they depend on it.
        tolerance: Largest relative difference of numbers.
        choices: Answers that `lessons.ask` offers, or a mapping from the displayed text to the answer; a function of
            the number of ranks if they depend on it. If the answer is a mapping, these are the choices for each key.
        placeholder: Example of the notation of an answer, displayed in an empty field. Not the right answer.
    """

    answer: Any
    why: str
    hint: str
    traps: Mapping[Any, str] | Callable[[int], Mapping[Any, str]] = field(default_factory=dict)
    tolerance: float = 1e-5
    choices: Choices | Callable[[int], Choices] = ()
    placeholder: str = ""

    @property
    def is_asked(self) -> bool:
        """Return whether `lessons.ask` can ask it. The answer to any other question is computed by the reader."""
        return bool(self.choices or self.placeholder)

    def right(self) -> Any:
        """Return the right answer for the running ranks."""
        return self.answer(_world_size()) if callable(self.answer) else self.answer

    def labelled_choices(self) -> dict[str, Any]:
        """Return the choices by their displayed text; {} if the answer is written into a field."""
        choices = self.choices(_world_size()) if callable(self.choices) else self.choices
        return dict(choices) if isinstance(choices, Mapping) else {str(one): one for one in choices}

    def in_words(self, answer: Any, words: Callable[[str], str] = str) -> str:
        """Return an answer as displayed to the reader.

        Args:
            answer: An answer.
            words: Translates a label.

        Example:
            >>> Question(answer=1, why="", hint="", choices={"rank 0": 0, "rank 1": 1}).in_words(1)
            'rank 1'
        """
        if isinstance(answer, Mapping):
            keys = {key: f"rank {key}" if type(key) is int else words(str(key)) for key in answer}
            return ", ".join(f"{keys[key]}: {self.in_words(value, words)}" for key, value in answer.items())
        for label, value in self.labelled_choices().items():
            if _is_equal(answer, value, 0.0):
                return words(label)
        if isinstance(answer, float):
            return f"{answer:.6g}"
        if isinstance(answer, list | tuple):
            inner = ", ".join(map(self.in_words, answer))
            return f"({inner})" if isinstance(answer, tuple) else f"[{inner}]"
        return str(answer)


def judge(asked: Question, answer: Any) -> tuple[bool, str]:
    """Return whether the answer is right, and the explanation to show."""
    if is_missing(answer):
        return False, translated("put your answer in place of the dots")
    right = asked.right()
    if isinstance(right, Mapping) and isinstance(answer, Mapping):
        wrong = [key for key in right if key not in answer or not _is_equal(answer[key], right[key], asked.tolerance)]
        if wrong or set(answer) - set(right):
            return False, f"{_where(wrong)}{translated(asked.hint)}"
    elif not _is_equal(answer, right, asked.tolerance):
        traps = asked.traps(_world_size()) if callable(asked.traps) else asked.traps
        met = [text for trap, text in traps.items() if _is_equal(answer, trap, asked.tolerance)]
        return False, " ".join(map(translated, [*met[:1], asked.hint]))
    return True, translated(asked.why)


def _where(wrong: list[Any]) -> str:
    if not wrong:
        return ""
    ranks = all(type(key) is int for key in wrong)
    return f"{translated('look at')} {name_ranks(wrong) if ranks else ', '.join(map(str, wrong))}. "


def _world_size() -> int:
    """Return the number of running ranks, or of those that ran last: guesses may follow %ddp_stop."""
    global _last_world_size
    from ddp_notebook.session import current

    if (session := current()) is not None:
        _last_world_size = session.world_size
    if _last_world_size is None:
        raise UsageError("the answer depends on the number of ranks: start ranks with %ddp_start 4")
    return _last_world_size


def is_missing(answer: Any) -> bool:
    """Return whether an answer still has the dots of the notebook."""
    if isinstance(answer, Mapping):
        return any(map(is_missing, answer.values()))
    return isinstance(answer, EllipsisType) or (isinstance(answer, list | tuple) and any(map(is_missing, answer)))


def _is_equal(given: Any, right: Any, tolerance: float) -> bool:
    """Compare numbers with a tolerance, lists and tuples by item, and other values with ==. Arrays and tensors are
    lists."""
    given = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(right, bool) or isinstance(given, bool):
        return given is right
    if isinstance(right, int | float):
        return isinstance(given, int | float) and math.isclose(given, right, rel_tol=tolerance, abs_tol=1e-9)
    if isinstance(right, list | tuple):
        if not isinstance(given, list | tuple) or len(given) != len(right):
            return False
        return all(_is_equal(one, other, tolerance) for one, other in zip(given, right, strict=True))
    if isinstance(right, str):
        return isinstance(given, str) and given.strip().lower() == right.lower()
    return bool(given == right)
