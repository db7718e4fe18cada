"""The links from the glossary back to the lessons: below each term the lessons that explain or use it."""

from __future__ import annotations

import re

import nbformat

from tools.course.contents import link
from tools.course.declaration import Course

_ENTRY = re.compile(r'(<a id="(?P<anchor>[^"]+)"></a>\n\n### (?P<title>.+)\n\n(?:- .+\n)+)(?:\nLessons: .*\n)?')
# Words of the lessons for terms that they do not write out.
_NAMED = {"Expert parallelism": "expert", "Fault injection": "ddp_fault"}
_MOST = 5  # lessons for one term


def with_lessons(page: str, course: Course) -> str:
    """Return the glossary with a line of lessons below each term.

    These are the first lessons, in the order of reading, that link to the term, or else those that name it.
    """
    texts = {number: _text(course, number) for number in course.lessons}

    def with_line(found: re.Match[str]) -> str:
        numbers = lessons_of(found["anchor"], found["title"], texts)
        links = ", ".join(link(course.lessons[number]) for number in numbers)
        return found[1] + (f"\nLessons: {links}\n" if links else "")

    return _ENTRY.sub(with_line, page)


def lessons_of(anchor: str, title: str, texts: dict[str, str]) -> list[str]:
    """Return the numbers of the lessons for a term.

    Example:
        >>> lessons_of("rank", "Rank", {"01": "a rank", "04": "[rank](glossary.md#rank)"})
        ['04']
        >>> lessons_of("node", "Node", {"01": "One node", "02": "nodes and a model"})
        ['01', '02']
    """
    linking = [number for number, text in texts.items() if f"glossary.md#{anchor})" in text]
    spelled = re.sub(r"[ -]", "[ _-]", _NAMED.get(title, title))  # also as a function: all_gather_into_tensor
    word = re.compile(rf"\b{spelled}s?\b", re.IGNORECASE)
    return (linking or [number for number, text in texts.items() if word.search(text)])[:_MOST]


def _text(course: Course, number: str) -> str:
    cells = nbformat.read(course.lessons[number].file, as_version=4).cells
    texts = [cell.source for cell in cells if cell.cell_type == "markdown"]
    return "\n".join([*texts, *(cell.source for cell in cells if cell.source.startswith("%ddp_fault"))])
