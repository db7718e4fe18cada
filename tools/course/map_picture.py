"""The map of the course as SVG: a node for each lesson, an edge for each prerequisite.

Columns are the branches of the course. A lesson lies below all lessons that it needs. Edges run in the gaps between
rows and columns, so that none crosses a lesson.
"""

from __future__ import annotations

import textwrap
from collections import defaultdict
from dataclasses import dataclass, field
from html import escape

from tools.course.declaration import Course, Lesson

WIDTH = 800.0
_MARGIN, _TOP = 6.0, 62.0
_GAP = 24.0  # between columns
NODE_HEIGHT, _ROW_GAP = 62.0, 28.0
_LANE = 4.0  # between edges that run side by side
_PORT = 14.0  # between edges that end at the same lesson
_FONT = 11.0
_LETTERS = 20  # most letters in a line of a title
_TEXT, _GREY, _EDGE = "#1a1a1a", "#595959", "#7a7a7a"


def svg(course: Course) -> str:
    """Return the map of a course as an SVG document with a text for screen readers."""
    layout = Layout(course)
    height = layout.bottom + _MARGIN
    order = ", ".join(f"{lesson.number} {lesson.title}" for lesson in course.lessons.values())
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {height:g}" width="{WIDTH:g}" '
        f'height="{height:g}" font-family="system-ui, sans-serif" role="img" aria-labelledby="title order">',
        '<title id="title">Map of the course</title>',
        f'<desc id="order">The lessons in the order of reading: {escape(order)}.</desc>',
        f'<rect width="{WIDTH:g}" height="{height:g}" rx="8" fill="#ffffff"/>',
        *_legend(course),
        *(_heading(layout.left(name), layout.node_width, title) for name, title in course.branches.items()),
        *(_edge(points) for points in layout.edges()),
        *(_node(course, lesson, layout) for lesson in course.lessons.values()),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


@dataclass
class Layout:
    """Positions of lessons and edges.

    Args:
        course: The declared course.
        row: Row of each lesson by number, from 0 at the top.
    """

    course: Course
    row: dict[str, int] = field(default_factory=dict)
    _lanes: dict[tuple[str, int], list[object]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        used: set[tuple[str, int]] = set()
        for number, lesson in self.course.lessons.items():
            row = max((self.row[need] + 1 for need in lesson.needs), default=0)
            while (lesson.branch, row) in used:
                row += 1
            used.add((lesson.branch, row))
            self.row[number] = row

    @property
    def node_width(self) -> float:
        columns = len(self.course.branches)
        return (WIDTH - 2 * _MARGIN - _GAP * columns) / columns

    @property
    def bottom(self) -> float:
        return self._y(max(self.row.values())) + NODE_HEIGHT

    def left(self, branch: str) -> float:
        """Return the left side of a column. To the left of each column is a gap for edges."""
        return _MARGIN + self._column(branch) * (self.node_width + _GAP) + _GAP

    def corner(self, lesson: Lesson) -> tuple[float, float]:
        """Return the left upper corner of a lesson."""
        return self.left(lesson.branch), self._y(self.row[lesson.number])

    def edges(self) -> list[list[tuple[float, float]]]:
        """Return the corners of each edge, from the needed lesson to the one that needs it."""
        lessons = self.course.lessons
        return [self._route(lessons[need], lesson) for lesson in lessons.values() for need in lesson.needs]

    def _route(self, source: Lesson, target: Lesson) -> list[tuple[float, float]]:
        start_x, start_y = self._middle(source)
        start_y += NODE_HEIGHT
        end_x, end_y = self._middle(target)
        from_row, to_row = self.row[source.number], self.row[target.number]
        is_next = to_row == from_row + 1
        if is_next and source.branch == target.branch:
            return [(start_x, start_y), (end_x, end_y)]
        end_x += self._shift(source, target)
        first = start_y + 6 + self._lane("below", from_row, source.number)
        if is_next:
            return [(start_x, start_y), (start_x, first), (end_x, first), (end_x, end_y)]
        gap = self._column(target.branch) + (1 if self._is_right(source, target) else 0)
        gap_x = _MARGIN + gap * (self.node_width + _GAP) + 5 + self._lane("beside", gap, source.number)
        last = end_y - 9 - self._lane("above", to_row, (source.number, target.number))
        return [(start_x, start_y), (start_x, first), (gap_x, first), (gap_x, last), (end_x, last), (end_x, end_y)]

    def _shift(self, source: Lesson, target: Lesson) -> float:
        """Return where an edge ends, relative to the middle of its target: on the side from which it comes."""
        side = self._is_right(source, target)
        lessons = [self.course.lessons[need] for need in target.needs]
        beside = [one for one in lessons if not self._is_above(one, target)]
        same = [one.number for one in beside if self._is_right(one, target) == side]
        return _PORT * (1 + same.index(source.number)) * (1 if side else -1)

    def _is_above(self, source: Lesson, target: Lesson) -> bool:
        return source.branch == target.branch and self.row[target.number] == self.row[source.number] + 1

    def _is_right(self, source: Lesson, target: Lesson) -> bool:
        return self._column(source.branch) > self._column(target.branch)

    def _lane(self, kind: str, at: int, edge: object) -> float:
        lanes = self._lanes[kind, at]
        if edge not in lanes:
            lanes.append(edge)
        return _LANE * lanes.index(edge)

    def _middle(self, lesson: Lesson) -> tuple[float, float]:
        """Return the middle of the upper side of a lesson."""
        x, y = self.corner(lesson)
        return x + self.node_width / 2, y

    def _column(self, branch: str) -> int:
        return list(self.course.branches).index(branch)

    def _y(self, row: int) -> float:
        return _TOP + row * (NODE_HEIGHT + _ROW_GAP)


def _legend(course: Course) -> list[str]:
    x, parts = _MARGIN + _GAP, []
    for path in course.paths:
        parts += [_mark(x, 9, path.mark, path.colour), _text(x + 20, 21, path.name, size=12)]
        x += 34 + 6.6 * len(path.name)
    explained = "Arrow: needed for the next one. Dashed: optional."
    return [*parts, _text(WIDTH - _MARGIN - 2, 21, explained, size=11, colour=_GREY, anchor="end")]


def _heading(x: float, width: float, title: str) -> str:
    return _text(x + width / 2, 50, title, size=12.5, colour=_GREY, anchor="middle", weight="bold")


def _edge(points: list[tuple[float, float]]) -> str:
    *_, (x, y) = points
    path = "M" + " L".join(f"{at_x:g},{at_y:g}" for at_x, at_y in points)
    head = f"M{x - 3.5:g},{y - 6:g} L{x + 3.5:g},{y - 6:g} L{x:g},{y:g} Z"
    return (
        f'<path d="{path}" fill="none" stroke="{_EDGE}" stroke-width="1.2" stroke-linejoin="round"/>'
        f'<path d="{head}" fill="{_EDGE}"/>'
    )


def _node(course: Course, lesson: Lesson, layout: Layout) -> str:
    x, y = layout.corner(lesson)
    dashes = ' stroke-dasharray="4 3"' if lesson.optional else ""
    lines = textwrap.wrap(f"{lesson.number} {lesson.title}", _LETTERS)
    marks = [path for path in course.paths if lesson.number in path.lessons]
    parts = [
        f'<rect x="{x:g}" y="{y:g}" width="{layout.node_width:g}" height="{NODE_HEIGHT:g}" rx="6" '
        f'fill="#f4f6f8" stroke="#44546a"{dashes}/>',
        *(_text(x + 7, y + 15 + 13 * at, line, size=_FONT) for at, line in enumerate(lines)),
        _text(x + layout.node_width - 6, y + 55, f"{lesson.minutes} min", size=10, colour=_GREY, anchor="end"),
        *(_mark(x + 6 + 16 * at, y + 44, path.mark, path.colour) for at, path in enumerate(marks)),
    ]
    return f'<a href="{escape(lesson.file.name)}">{"".join(parts)}</a>'


def _mark(x: float, y: float, letter: str, colour: str) -> str:
    """Return a letter on a small square, which stands for a path."""
    letters = _text(x + 7, y + 11, letter, size=10, colour="#ffffff", anchor="middle", weight="bold")
    return f'<rect x="{x:g}" y="{y:g}" width="14" height="14" rx="3" fill="{colour}"/>{letters}'


def _text(
    x: float, y: float, text: str, *, size: float, colour: str = _TEXT, anchor: str = "start", weight: str = "normal"
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{colour}" text-anchor="{anchor}" '
        f'font-weight="{weight}">{escape(text)}</text>'
    )
