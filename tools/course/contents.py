"""The parts of notebooks/README.md that follow from the declaration of the course: the paths and the table of lessons.

Each part lies between two comments in the page and is replaced as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from tools.course.declaration import Course, LearningPath, Lesson

_PART = "<!-- {name}: written by python -m tools.course -->\n\n{text}\n\n<!-- end of {name} -->"


def with_parts(page: str, parts: dict[str, str]) -> str:
    """Return a page with new parts.

    Args:
        page: Text with a pair of comments for each part.
        parts: Text of each part by name.

    Raises:
        ValueError: The page has no such part.

    Example:
        >>> with_parts("<!-- a: written by python -m tools.course --><!-- end of a -->", {"a": "text"}).splitlines()[2]
        'text'
    """
    for name, text in parts.items():
        found = re.search(rf"<!-- {name}: written by .*? -->.*?<!-- end of {name} -->", page, re.DOTALL)
        if found is None:
            raise ValueError(
                f"the page has no part {name!r}; add <!-- {name}: written by ... --><!-- end of {name} -->"
            )
        page = page[: found.start()] + _PART.format(name=name, text=text) + page[found.end() :]
    return page


def parts(course: Course) -> dict[str, str]:
    """Return the parts of the table of contents by name."""
    return {"paths": "\n\n".join(_path(course, one) for one in course.paths), "lessons": _table(course)}


def _path(course: Course, path: LearningPath) -> str:
    minutes = course.minutes(path.lessons)
    duration = f"{minutes} minutes, or {minutes / 60:.1f} hours".replace(".0 hours", " hours")
    lines = [f"### {path.mark}: {path.name}", "", path.for_whom, "", f"- {duration}: {_links(course, path.lessons)}"]
    if path.further:
        lines.append(f"- further: {_links(course, path.further)}")
    return "\n".join(lines)


def _table(course: Course) -> str:
    rows = ["| lesson | what you learn | after | minutes |", "|---|---|---|---|"]
    for lesson in course.lessons.values():
        optional = " (optional)" if lesson.optional else ""
        name = f"[{lesson.number} {lesson.title}]({lesson.file.name}){optional}"
        rows.append(f"| {name} | {lesson.about} | {', '.join(lesson.needs)} | {lesson.minutes} |")
    return "\n".join(rows)


def _links(course: Course, numbers: Iterable[str]) -> str:
    return " → ".join(link(course.lessons[number]) for number in numbers)


def link(lesson: Lesson) -> str:
    """Return a Markdown link to a lesson, for a page in the folder of the notebooks."""
    return f"[{lesson.number}]({lesson.file.name})"
