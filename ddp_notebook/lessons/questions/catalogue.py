"""All questions and puzzles of the course by name: the number of the lesson and a word.

The modules `lesson_NN` of this folder are found by their names, so a new lesson needs no entry here.
"""

from __future__ import annotations

import difflib
import pkgutil
import re
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

from ddp_notebook.lessons import questions
from ddp_notebook.lessons.questions.judging import Question
from ddp_notebook.lessons.questions.puzzles import Puzzle


def _modules() -> Iterator[ModuleType]:
    """Yield the modules of the lessons in their order.

    Raises:
        ValueError: The name of a question does not start with the number of its lesson.
    """
    for name in sorted(module.name for module in pkgutil.iter_modules(questions.__path__)):
        if not (match := re.fullmatch(r"lesson_(\d\d)", name)):
            continue
        module = import_module(f"{questions.__name__}.{name}")
        names = [*getattr(module, "QUESTIONS", {}), *getattr(module, "PUZZLES", {})]
        if misplaced := [one for one in names if not one.startswith(f"{match[1]}/")]:
            raise ValueError(f"questions of {name} must start with {match[1]}/, got {', '.join(misplaced)}")
        yield module


QUESTIONS: dict[str, Question] = {}
PUZZLES: dict[str, Puzzle] = {}
for _module in _modules():
    QUESTIONS |= getattr(_module, "QUESTIONS", {})
    PUZZLES |= getattr(_module, "PUZZLES", {})


def names() -> list[str]:
    """Return the names of all questions and puzzles."""
    return sorted([*QUESTIONS, *PUZZLES])


def unknown(name: object) -> str:
    """Return the message for an unknown name, with similar names."""
    of_lesson = [one for one in names() if one[:3] == str(name)[:3]]
    near = of_lesson or difflib.get_close_matches(str(name), names()) or [next(iter(QUESTIONS))]
    return f"unknown question {name!r}; there are {', '.join(near)}"
