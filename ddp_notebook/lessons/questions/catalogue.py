"""All questions of the course by name: the number of the lesson and a word.

The modules `lesson_NN` of this folder are found by their names, so a new lesson needs no entry here.
"""

from __future__ import annotations

import pkgutil
import re
from importlib import import_module

from ddp_notebook.lessons import questions
from ddp_notebook.lessons.questions.judging import Question


def _load() -> dict[str, Question]:
    """Return the questions of every lesson, in the order of the lessons.

    Raises:
        ValueError: The name of a question does not start with the number of its lesson.
    """
    found: dict[str, Question] = {}
    for name in sorted(module.name for module in pkgutil.iter_modules(questions.__path__)):
        if not (match := re.fullmatch(r"lesson_(\d\d)", name)):
            continue
        own = import_module(f"{questions.__name__}.{name}").QUESTIONS
        if misplaced := [one for one in own if not one.startswith(f"{match[1]}/")]:
            raise ValueError(f"questions of {name} must start with {match[1]}/, got {', '.join(misplaced)}")
        found |= own
    return found


QUESTIONS = _load()
