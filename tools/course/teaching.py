"""The teacher's guide, notebooks/teaching.md: a plan for each lesson, and the wrong answers to expect.

The plans are in notebooks/teaching.toml. The answers are those of the questions of the lessons.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

import nbformat

from ddp_notebook.lessons.questions.catalogue import QUESTIONS
from ddp_notebook.lessons.questions.judging import Question
from tools.course.catalogue import question, ranks
from tools.course.contents import link
from tools.course.declaration import FOLDER, Course, Lesson

FILE = FOLDER / "teaching.toml"
_LONGEST_ANSWER = 300  # longer ones are only in the notebook
_NEVER_TAUGHT = {"Remember", "Where it is used", "Read more", "Exercises", "Look at the run"}

_HEAD = """\
# Teacher's guide

Each lesson fits into 50 minutes with a class: the plan takes the parts that are worth discussing, and leaves the rest
for home. [For teachers](../docs/guide/teachers.md) explains how to install the package for a class, how to make slides,
and how students hand in.

## Before each class

- Run the whole lesson once on the machine of the class, with the number of ranks that you will use
  (`DDP_NOTEBOOK_RANKS=2 jupyter lab`). Two cores are enough; times differ from the text then.
- Ten minutes before class, run the cells up to the first question. They load torch in each rank, which takes 20
  seconds or more on two busy cores. Most other cells take one or two seconds; the plan names the slow ones.
- Prepare the drawing and the other things under *On the board*.

## In class

- **Ask first.** The result of a question appears after a guess. All students guess before the cell is run. A
  guess takes about two minutes: read the question aloud, vote by a show of hands, and let two students explain.
- **The column "part of the notebook"** names headings. "At home" lists the parts that the plan leaves out. Run their
  cells too, because later cells may use their variables: select the next cell of your plan, then *Run > Run All Above
  Selected Cell*.
- **Answers** below are for the number of ranks that the lesson starts by default: four, or two in lessons 19 to 28.
  With another number, `lessons.result` shows the right one.
- **Without widgets** a student answers in a new cell: `lessons.ask("06/reduce", "the sum")`. The text is that of the
  choice, or the value for a field. Views become pictures. `python tools/demo.py notebooks/06_collectives.ipynb` runs a
  whole lesson in a terminal and shows all results at once, so use it for a check and not for a class that guesses.

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
    return sum(minutes for minutes, _, _ in steps(row))


def steps(row: dict[str, Any]) -> list[tuple[int, list[str], str]]:
    """Return the minutes, the headings of the notebook, and the text of each step of a plan."""
    found = []
    for step in row["plan"]:
        duration, parts, text = step.split("|", 2)
        found.append((int(duration), [part for part in parts.strip().split("; ") if part], text.strip()))
    return found


def headings(lesson: Lesson, levels: str = "##") -> list[str]:
    """Return the headings of a lesson below its title.

    Args:
        lesson: The lesson.
        levels: Regular expression of the number signs before a heading.
    """
    cells = nbformat.read(lesson.file, as_version=4).cells
    texts = [
        re.sub(r"^```.*?^```", "", cell.source, flags=re.M | re.S) for cell in cells if cell.cell_type == "markdown"
    ]
    return [title for text in texts for title in re.findall(rf"^{levels} (.*)$", text, re.MULTILINE)]


def _section(lesson: Lesson, row: dict[str, Any]) -> str:
    lines = [f"## {lesson.number} {lesson.title}", "", f"Lesson {link(lesson)}. {row['before']}", ""]
    lines += ["| minutes | part of the notebook | plan |", "|---|---|---|"]
    begin = 0
    for duration, parts, text in steps(row):
        lines.append(f"| {begin} to {begin + duration} | {'; '.join(parts)} | {text} |")
        begin += duration
    taught = {part for _, parts, _ in steps(row) for part in parts}
    if home := [title for title in headings(lesson) if title not in taught | _NEVER_TAUGHT]:
        lines += ["", f"**At home**: {'; '.join(home)}."]
    lines += ["", f"**On the board.** {row['board'].strip()}", ""]
    names = [name for name in QUESTIONS if name[:2] == lesson.number]
    if names:
        size = ranks(lesson)
        lines += ["**Answers, wrong answers to expect, and help to give**", ""]
        lines += [line for name in names for line in _answers(name, question(name, size))]
        lines.append("")
    return "\n".join(lines)


def _answers(name: str, asked: Question) -> Iterator[str]:
    """Yield a line with the right answer, one for each wrong answer that a question explains, and one with its hint."""
    right = asked.in_words(asked.answer)
    yield f"- `{name}`" + (f": **{right}** is right." if len(right) <= _LONGEST_ANSWER else "")
    traps = asked.traps if isinstance(asked.traps, Mapping) else {}  # `question` has called a function
    for answer, text in traps.items():
        yield f"  - *{asked.in_words(answer)}*: {text}"
    yield f"  - {'Other wrong answers' if asked.traps else 'Help'}: {asked.hint}"
