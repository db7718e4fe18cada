"""Tables of the kept answers: `lessons.progress` for a reader, `lessons.collect` for a class, and `lessons.forget`."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from glob import glob
from pathlib import Path

from ddp_notebook.errors import UsageError
from ddp_notebook.lessons.questions.answers_file import Answered, Guess, answers_file, read
from ddp_notebook.lessons.questions.catalogue import names

_STATUS = ("first try", "later", "wrong", "shown", "open")
_HEADS = ("right at first try", "right later", "wrong so far", "shown", "open")
_MOST_LISTED = 10


@dataclass(frozen=True, slots=True)
class AnswersTable:
    """Table of numbers of questions. The notebook displays it as HTML.

    Args:
        heads: Titles of the columns.
        rows: Cells of each row.
        notes: Lines below the table.
    """

    heads: tuple[str, ...]
    rows: tuple[tuple[str | int, ...], ...]
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        texts = [self.heads, *(tuple(map(str, row)) for row in self.rows)]
        widths = [max(len(row[column]) for row in texts) for column in range(len(self.heads))]
        lines = []
        for row in texts:
            numbers = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
            lines.append("  ".join([row[0].ljust(widths[0]), *numbers]))
        return "\n".join([*lines, *self.notes])

    def _repr_html_(self) -> str:
        heads = "".join(f"<th>{html.escape(head)}</th>" for head in self.heads)
        rows = "".join(f"<tr>{''.join(f'<td>{html.escape(str(cell))}</td>' for cell in row)}</tr>" for row in self.rows)
        notes = "".join(f"<div>{html.escape(note)}</div>" for note in self.notes)
        return f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>{notes}"


def progress() -> AnswersTable:
    """Return how many questions of each lesson you have answered: at first try, later, wrong, shown, open.

    Example:
        >>> lessons.progress()
        lesson  right at first try  right later  wrong so far  shown  open
        01                       0            0             0      0     5
        ...
    """
    answers = answers_file().read()
    counts = {lesson: _count(names, answers) for lesson, names in _lessons().items()}
    total = tuple(sum(column) for column in zip(*counts.values(), strict=True))
    rows: list[tuple[str | int, ...]] = [(lesson, *count) for lesson, count in counts.items()]
    return AnswersTable(("lesson", *_HEADS), (*rows, ("all", *total)))


def collect(files: str | Iterable[str | Path] = "*.json", lesson: str | None = None) -> AnswersTable:
    """Return the progress of a class, one row for each file of answers, and the questions that most have got wrong.

    Args:
        files: Pattern of file names, such as "class/*.json", or paths.
        lesson: Number of a lesson, such as "06": only its questions count, and the wrong answers have the names of
            their files.

    Raises:
        UsageError: No file matches, a file has no answers, or there is no such lesson.
    """
    counted = _chosen(lesson)
    paths = sorted(glob(files)) if isinstance(files, str) else [str(path) for path in files]
    if not paths:
        raise UsageError(f"no file matches {files!r}; collect the files my_answers.json in one folder, one name each")
    of_all = {path: read(Path(path)) for path in paths}
    rows: list[tuple[str | int, ...]] = [
        (Path(path).stem, *_count(counted, answers)) for path, answers in of_all.items()
    ]
    of_lesson = {
        Path(path).stem: {name: one for name, one in answers.items() if lesson is None or name in counted}
        for path, answers in of_all.items()
    }
    return AnswersTable(("file", *_HEADS), tuple(rows), tuple(_most_wrong(of_lesson, with_files=lesson is not None)))


def forget(lesson: str | None = None) -> None:
    """Delete kept answers, so that results are hidden again.

    Args:
        lesson: Number of a lesson, such as "05", or name of a question; None for all.

    Raises:
        UsageError: There is no such lesson or question.
    """
    chosen = _chosen(lesson)
    file = answers_file()
    kept = file.read()
    gone = {name for name in kept if lesson is None or name in chosen}
    file.forget(gone)
    print(f"{len(gone)} answer{'s' * (len(gone) != 1)} deleted.")


def _chosen(lesson: str | None) -> list[str]:
    """Return the names of the questions of a lesson, of all lessons (None), or the name of one question."""
    chosen = [name for name in names() if lesson is None or name == lesson or name.split("/")[0] == lesson]
    if not chosen:
        raise UsageError(f"lesson must be one of {', '.join(_lessons())} or the name of a question, got {lesson!r}")
    return chosen


def _lessons() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in names():
        found.setdefault(name.split("/")[0], []).append(name)
    return found


def _count(names: Iterable[str], answers: Mapping[str, Answered]) -> tuple[int, ...]:
    status = Counter(answers.get(name, Answered()).status for name in names)
    return tuple(status[one] for one in _STATUS)


def _most_wrong(answers: Mapping[str, Mapping[str, Answered]], *, with_files: bool) -> list[str]:
    """Return a line for each question with wrong first guesses: how many, and the most frequent one.

    Args:
        answers: Answers by question, by file.
        with_files: Add the wrong answer of each file.
    """
    firsts: dict[str, dict[str, Guess]] = {}
    for file, of_file in answers.items():
        for name, answered in of_file.items():
            if answered.guesses:
                firsts.setdefault(name, {})[file] = answered.guesses[0]
    wrong = {
        name: {file: guess.answer for file, guess in given.items() if not guess.is_right}
        for name, given in firsts.items()
    }
    order = sorted((name for name in wrong if wrong[name]), key=lambda name: (-len(wrong[name]), name))
    lines = []
    for name in order[:_MOST_LISTED]:
        [(answer, times)] = Counter(wrong[name].values()).most_common(1)
        often = f"{times} x {answer}"
        lines.append(f"{name}: {len(wrong[name])} of {len(firsts[name])} wrong at first try; most often {often}")
        if with_files:
            lines += [f"  {file}: {answer}" for file, answer in wrong[name].items()]
    return ["Most often wrong:", *(f"  {line}" for line in lines)] if lines else []
