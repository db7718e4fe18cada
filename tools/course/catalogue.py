"""The questions of the lessons for a number of ranks, without a session."""

from __future__ import annotations

import re
from dataclasses import replace

import nbformat

from ddp_notebook.lessons.questions.catalogue import QUESTIONS
from ddp_notebook.lessons.questions.judging import Question
from tools.course.declaration import Lesson

_STARTED = re.compile(r"^%ddp_start (\d+)\b", re.MULTILINE)
_RANKS = 4  # default of the lessons that read DDP_NOTEBOOK_RANKS


def ranks_of(notebook: nbformat.NotebookNode) -> int:
    """Return the number of ranks that a lesson starts by default."""
    for cell in notebook.cells:
        if cell.cell_type == "code" and (found := _STARTED.search(cell.source)):
            return int(found[1])
    return _RANKS


def ranks(lesson: Lesson) -> int:
    """Return the number of ranks that a lesson starts by default."""
    return ranks_of(nbformat.read(lesson.file, as_version=4))


def question(name: str, size: int) -> Question:
    """Return a question with its answer, choices and explanations for a number of ranks."""
    asked = QUESTIONS[name]
    answer = asked.answer(size) if callable(asked.answer) else asked.answer
    choices = asked.choices(size) if callable(asked.choices) else asked.choices
    traps = asked.traps(size) if callable(asked.traps) else asked.traps
    return replace(asked, answer=answer, choices=choices, traps=traps)
