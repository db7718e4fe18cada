"""The teacher's guide, notebooks/teaching.md: a plan for each lesson, and the wrong answers to expect.

The plans are in notebooks/teaching.toml. The wrong answers are those that the questions of the lessons explain.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from typing import Any

from ddp_notebook.lessons.questions.catalogue import QUESTIONS
from ddp_notebook.lessons.questions.judging import Question
from tools.course.contents import link
from tools.course.declaration import FOLDER, Course, Lesson

FILE = FOLDER / "teaching.toml"
_RANKS = 4  # in answers that depend on the number of ranks

_HEAD = """\
# Teacher's guide

Each lesson fits into 50 minutes with a class: the plan takes the parts that are worth discussing, and leaves the rest
to read. [For teachers](../docs/guide/teachers.md) explains how to install the package for a class.

## Before the course

- Run each lesson once on the machine of the class, with the number of ranks that you will use
  (`DDP_NOTEBOOK_RANKS=2 jupyter lab`). Two cores are enough; times differ from the text then.
- **Ask first.** The result of a question appears after a guess. Let everybody guess before anybody runs the cell.
  `lessons.progress()` shows a student's own answers, and `lessons.collect("*.json")` those of a class.
- **Slides**: `make slides LESSONS="04 06"` writes slides of the same notebooks into `build/slides/`, with the text as
  notes (key S) and without solutions. `SLIDES_OPTIONS=--execute` adds the outputs of all cells.
- **Without widgets** every lesson works too: in a terminal, in editors without ipywidgets, and with `nbclient`. Views
  become pictures, and questions become text with the way to answer: `lessons.ask("05/changed", "my answer")`.
  `python tools/demo.py notebooks/06_collectives.ipynb` runs a lesson in the terminal.
- **Languages**: `make languages` writes Korean and Traditional Chinese versions of some lessons into `notebooks/ko` and
  `notebooks/zh-TW`. Code, questions and answers are the same, so a class can mix languages. The
  [glossary](glossary.md) has all terms in the three languages.

## A course of several weeks

The three paths of [the table of contents](README.md) are three courses. One lesson a week leaves time for its
exercises. Capstones are projects for two weeks.

"""


def guide(course: Course) -> str:
    """Return the teacher's guide as Markdown."""
    with FILE.open("rb") as file:
        rows = {row["number"]: row for row in tomllib.load(file)["lesson"]}
    sections = [_section(lesson, rows[number]) for number, lesson in course.lessons.items() if number in rows]
    return _HEAD + "\n".join(sections)


def minutes(row: dict[str, Any]) -> int:
    """Return the minutes of a plan."""
    return sum(int(step.split(" ", 1)[0]) for step in row["plan"])


def _section(lesson: Lesson, row: dict[str, Any]) -> str:
    lines = [f"## {lesson.number} {lesson.title}", "", f"Lesson {link(lesson)}. {row['before']}", ""]
    lines += ["| minutes | plan |", "|---|---|"]
    begin = 0
    for step in row["plan"]:
        duration, text = step.split(" ", 1)
        lines.append(f"| {begin} to {begin + int(duration)} | {text} |")
        begin += int(duration)
    lines += ["", f"**On the board.** {row['board']}", ""]
    wrong = [
        line for name, question in QUESTIONS.items() if name[:2] == lesson.number for line in _wrong(name, question)
    ]
    if wrong:
        lines += ["**Wrong answers to expect, and help to give**", "", *wrong, ""]
    return "\n".join(lines)


def _wrong(name: str, question: Question) -> Iterator[str]:
    """Yield a line for each wrong answer that a question explains, and one with its hint."""
    traps = question.traps(_RANKS) if callable(question.traps) else question.traps
    for answer, text in traps.items():
        shown = answer if isinstance(answer, str) else repr(answer)
        yield f"- `{name}`: `{shown}`. {text}"
    yield f"- `{name}`, other wrong answers: {question.hint}" if traps else f"- `{name}`: {question.hint}"
