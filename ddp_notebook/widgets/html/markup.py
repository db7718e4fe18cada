"""A small HTML and SVG writer: elements with escaped texts, and compact paths."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

Point = tuple[int, int]


class Markup(str):
    """Text that is already HTML. All other text is escaped when it becomes part of an element."""

    __slots__ = ()


def element(name: str, *content: str | None, **attributes: object) -> Markup:
    """Return an element.

    Args:
        name: Name of the tag.
        content: Elements, or texts, which are escaped. None is left out.
        attributes: `_` becomes `-`, and a trailing `_` is removed. Attributes with the value None are left out.

    Example:
        >>> element("th", "a < b", class_="x", scope="row", stroke_width=None)
        '<th class="x" scope="row">a &lt; b</th>'
    """
    given = "".join(
        f' {key.removesuffix("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{given}>{join(*content)}</{name}>")


def join(*content: str | None) -> Markup:
    """Concatenate elements and texts.

    Example:
        >>> join("a & b", element("b", "c"), None)
        'a &amp; b<b>c</b>'
    """
    return Markup("".join(one if isinstance(one, Markup) else html.escape(one) for one in content if one is not None))


def shorten(text: str, most: int) -> str:
    """Shorten a text to `most` characters by removing its middle: in a location, the file and the function matter most.

    Example:
        >>> shorten("a/very/long/path/model.py:88 in forward", 24)
        'a/very/long/… in forward'
    """
    if len(text) <= most:
        return text
    return f"{text[: most // 2]}…{text[len(text) - (most - 1 - most // 2) :]}"


def line(points: Sequence[Point]) -> str:
    """Return a path through these points. Relative coordinates halve its size.

    Example:
        >>> line([(10, 50), (14, 53), (18, 51)])
        'M10 50l4 3 4-2'
    """
    if not points:
        return ""
    (x, y), *rest = points
    words = []
    for x_next, y_next in rest:
        words += [x_next - x, y_next - y]
        x, y = x_next, y_next
    return f"M{_numbers(points[0])}" + (f"l{_numbers(words)}" if words else "h0")


def boxes(rectangles: Iterable[tuple[int, int, int, int]]) -> str:
    """Return one path for several rectangles: left, top, width, height.

    Example:
        >>> boxes([(1, 2, 3, 4), (5, 2, 3, 4)])
        'M1 2h3v4h-3zM5 2h3v4h-3z'
    """
    return "".join(f"M{left} {top}h{width}v{height}h-{width}z" for left, top, width, height in rectangles)


def _numbers(values: Iterable[int]) -> str:
    """Join numbers with spaces, except before a minus sign."""
    return "".join(str(one) if one < 0 else f" {one}" for one in values).strip()
