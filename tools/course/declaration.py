"""Reads the lessons, their prerequisites and the paths from notebooks/course.toml."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "notebooks"
FILE = FOLDER / "course.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """A lesson.

    Args:
        number: Two digits; they do not state the order of reading.
        title: Short title.
        file: Its notebook.
        minutes: Time to read, run and answer.
        branch: Name of its column on the map.
        about: What one learns, as a phrase in Markdown.
        needs: Numbers of the lessons that must come before.
        optional: Whether no path leads through it.
    """

    number: str
    title: str
    file: Path
    minutes: int
    branch: str
    about: str
    needs: tuple[str, ...] = ()
    optional: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningPath:
    """A selection of lessons for one purpose.

    Args:
        name: Title of the path.
        mark: Letter on the map.
        colour: Colour of the letter.
        lessons: Numbers in the order of reading.
        further: Lessons that continue the path.
        for_whom: One or two sentences.
    """

    name: str
    mark: str
    colour: str
    lessons: tuple[str, ...]
    further: tuple[str, ...]
    for_whom: str


@dataclass(frozen=True, slots=True)
class Course:
    """The declared course; lessons in the order of reading.

    Args:
        lessons: By number.
        paths: The learning paths.
        branches: Titles of the map's columns by name, from left to right.
    """

    lessons: dict[str, Lesson]
    paths: tuple[LearningPath, ...]
    branches: dict[str, str]

    def needed_for(self, number: str) -> set[str]:
        """Return the numbers of all lessons that come before a lesson, directly or indirectly."""
        direct = self.lessons[number].needs
        return {*direct, *(one for need in direct for one in self.needed_for(need))}

    def minutes(self, numbers: tuple[str, ...]) -> int:
        """Return the total duration of lessons."""
        return sum(self.lessons[number].minutes for number in numbers)


@functools.cache
def read() -> Course:
    """Read the declaration of the course."""
    with FILE.open("rb") as file:
        declared = tomllib.load(file)
    files = {path.name[:2]: path for path in notebooks()}
    rows = [row for row in declared["lesson"] if row["number"] in files]
    lessons = {row["number"]: Lesson(file=files[row["number"]], **_tuples(row, files)) for row in rows}
    paths = tuple(LearningPath(**_tuples(row, files)) for row in declared["path"])
    return Course(lessons, paths, {row["name"]: row["title"] for row in declared["branch"]})


def notebooks() -> list[Path]:
    """Return the notebooks of the course by number."""
    found = FOLDER.glob("[0-9][0-9]_*.ipynb")
    return sorted(path for path in found if not path.name.endswith(".executed.ipynb"))


def _tuples(row: dict[str, Any], known: dict[str, Path]) -> dict[str, Any]:
    """Return a row with tuples in place of its lists, without lessons that have no notebook yet."""
    return {
        name: tuple(one for one in value if one in known) if isinstance(value, list) else value
        for name, value in row.items()
    }
