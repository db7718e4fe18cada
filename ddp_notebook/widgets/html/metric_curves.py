"""Chart of a metric by step: one line for each rank, or for many ranks the range, the median and the furthest ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ddp_notebook.observe.figures.palette import LINES
from ddp_notebook.records.units import three_figures, two_figures
from ddp_notebook.records.words import list_ranks
from ddp_notebook.widgets.html.axes import BOTTOM, HEIGHT, LEFT, WIDTH, Axes, room
from ddp_notebook.widgets.html.markup import Markup, element, line, shorten
from ddp_notebook.widgets.html.series import Series, Values

_MOST_LINES = 8
_MOST_TOLD = 5  # further metrics in the caption
_WORST = 3  # lines in addition to the range
_MOST = 1e300  # larger values are clipped, so that the limits of the axis stay finite
_LOG_FROM = 100.0  # ratio of the largest to the smallest value from which the axis is logarithmic
_NAME = 40  # most characters of a metric's name
_RANKS = 28  # most characters of a set of ranks


class _Line(NamedTuple):
    label: str
    end: str  # last value, or the first wrong value and its step
    steps: Values  # (n,)
    values: Values  # (n,) NaN for missing values
    colour: str
    first_wrong: tuple[int, float] | None = None


def chart(name: str, course: Series, others: Mapping[str, Series]) -> Markup:
    """Return the chart of a metric.

    Args:
        name: Name of the metric.
        course: Series with at least one value.
        others: Further metrics. The caption shows the last value of the first ones.
    """
    steps = course.steps
    lines, band = _lines(course, steps)
    name, result = shorten(name, _NAME), in_words(course)
    drawn = element(
        "svg",
        element(
            "title",
            f"{name} {result}; by {course.unit}, {'the range of the ranks' if band is not None else 'of each rank'}",
        ),
        *_draw(course, steps, lines, band),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
    )
    key = [_key(one) for one in lines]
    if band is not None:
        key.append(element("li", element("i", class_="band"), f"range of {course.world_size} ranks"))
    if words := _missing(course, band is not None):
        key.append(element("li", words, class_="soft"))
    told = list(others.items())[:_MOST_TOLD]
    more = [element("span", f"{shorten(other, _NAME)} {_end(one)}", class_="soft") for other, one in told]
    caption = element("figcaption", element("b", name), " ", result, *more)
    return element("figure", caption, drawn, element("ul", *key))


def in_words(course: Series) -> str:
    """Return the first and the last value, as means of the ranks.

    Example:
        >>> course = Series(world_size=2)
        >>> course.add(np.array([0, 1, 0, 1]), np.array([0, 0, 1, 1]), np.array([2.0, 4.0, 1.0, 2.0]), cell=1)
        >>> in_words(course)
        '3.00 → 1.50'
    """
    if course.first_wrong:
        step, value = min(course.first_wrong.values())
        ranks = [rank for rank, one in course.first_wrong.items() if one[0] == step]
        return f"{value:g} from {course.unit} {step} on {shorten(list_ranks(sorted(ranks)), _RANKS)}"
    begin, end = _mean(course.begin[:, 1]), _mean(course.end)
    is_single = course.first_step == course.last_step
    return three_figures(end) if is_single else f"{three_figures(begin)} → {three_figures(end)}"


def _end(course: Series) -> str:
    wrong = course.first_wrong
    return f"{min(wrong.values())[1]:g}" if wrong else three_figures(_mean(course.end))


def _mean(values: Values) -> float:
    """Return the mean of the ranks that have a value."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else math.nan


def _missing(course: Series, is_band: bool) -> str:
    """Return a note with the number of drawn points if some are missing, or for a band the steps per point.

    Example:
        >>> course = Series(world_size=1)
        >>> course.add(np.zeros(4000, int), np.arange(4000), np.sin(np.arange(4000.0)), cell=1)
        >>> _missing(course, False)
        '1 of 31 points drawn: the lowest and the highest of neighbours'
        >>> course = Series(world_size=9)
        >>> course.add(np.arange(9), np.zeros(9, int), np.arange(9.0), cell=1)
        >>> _missing(course, True)
        "per 2 steps: lowest and highest value of the ranks, and the median of the ranks' means"
    """
    if is_band:
        if not len(course.steps):
            return ""
        means = "lowest and highest value of the ranks, and the median of the ranks' means"
        return f"per {course.width} {course.unit}s: {means}"
    logged, drawn = int(course.logged.sum()), course.drawn
    if drawn >= logged:
        return ""
    words = f"1 of {two_figures(logged / drawn)}" if logged >= 2 * drawn else f"{drawn:,} of {logged:,}"
    return f"{words} points drawn: the lowest and the highest of neighbours"


def _lines(course: Series, steps: Values) -> tuple[list[_Line], tuple[Values, Values] | None]:
    """Return the lines to draw. If there are too many ranks for one line each, also return the lowest and highest
    values."""
    known = [rank for rank in range(course.world_size) if course.has(rank)]
    points = {rank: course.points(rank) for rank in known}
    alike: dict[bytes, list[int]] = {}  # an averaged metric is equal on all ranks
    for rank in known:
        own = b"".join(one.tobytes() for one in points[rank])
        alike.setdefault(own + repr(course.first_wrong.get(rank)).encode(), []).append(rank)
    if len(alike) <= _MOST_LINES:
        return [
            _line(course, ranks, points[ranks[0]], LINES[at % len(LINES)]) for at, ranks in enumerate(alike.values())
        ], None
    means, (lowest, highest) = course.means, course.reach
    with np.errstate(invalid="ignore"):
        low, middle, high = (
            _of_ranks(find, rows) for find, rows in ((np.nanmin, lowest), (np.nanmedian, means), (np.nanmax, highest))
        )
        distance = _of_steps(np.abs(means - middle))
    worst = sorted(known, key=lambda rank: (rank not in course.first_wrong, -distance[rank]))[:_WORST]
    median = _Line("median", three_figures(_last(middle)), steps, middle, "currentColor")
    return [
        median,
        *(_line(course, [rank], points[rank], LINES[at + 1]) for at, rank in enumerate(sorted(worst))),
    ], (low, high)


def _line(course: Series, ranks: list[int], points: tuple[Values, Values], colour: str) -> _Line:
    wrong = course.first_wrong.get(ranks[0])
    label = "all ranks" if 1 < len(ranks) == course.world_size else shorten(list_ranks(ranks), _RANKS)
    end = f"{wrong[1]:g} from {course.unit} {wrong[0]}" if wrong else three_figures(float(course.end[ranks[0]]))
    return _Line(label, end, *points, colour, wrong)


def _key(one: _Line) -> Markup:
    swatch = element("i", class_="line", style=f"background:{one.colour}")
    return element("li", swatch, one.label, " ", element("b", one.end))


def _draw(course: Series, steps: Values, lines: list[_Line], band: tuple[Values, Values] | None) -> list[Markup]:
    drawn_values = np.concatenate([*(one.values for one in lines), *(band or ())])
    finite = drawn_values[np.isfinite(drawn_values)].clip(-_MOST, _MOST)
    if not len(finite):
        return [element("text", "no value is a number", x=WIDTH // 2, y=HEIGHT // 2, text_anchor="middle")]
    low, high = float(finite.min()), float(finite.max())
    is_log = low > 0 and high / low > _LOG_FROM
    y = (low / 1.2, high * 1.2) if is_log else room(low, high)
    axes = Axes(x=_reach(course), y=y, is_log=is_log)
    drawn = [axes.frame(course.unit)]
    if band is not None:
        edges = [*_places(axes, steps, band[1]), *reversed(_places(axes, steps, band[0]))]
        drawn.append(element("path", class_="band", d=f"{line(edges)}z"))
    for one in lines:
        places = _places(axes, one.steps, one.values)
        drawn.append(element("path", class_="line", stroke=one.colour, d=line(places)))
        if len(places) == 1 or one.first_wrong:
            drawn.append(_mark(places, axes, one))
    return drawn


def _mark(places: list[tuple[int, int]], axes: Axes, one: _Line) -> Markup:
    """Draw a circle for a single point, or a cross at the last finite point."""
    if one.first_wrong is None:
        return element("circle", cx=places[0][0], cy=places[0][1], r=6, fill=one.colour)
    before = [place for place in places if place[0] <= axes.at_x(one.first_wrong[0])]
    at_x, at_y = before[-1] if before else (LEFT, BOTTOM)
    return element("path", class_="line", stroke=one.colour, d=f"M{at_x - 9} {at_y - 9}l18 18m0-18l-18 18")


def _reach(course: Series) -> tuple[float, float]:
    first, last = float(course.first_step), float(course.last_step)
    return (first, last) if last > first else (first - 0.5, last + 0.5)


def _places(axes: Axes, steps: Values, values: Values) -> list[tuple[int, int]]:
    is_there = np.isfinite(values)
    shown = zip(steps[is_there].tolist(), values[is_there].clip(-_MOST, _MOST).tolist(), strict=True)
    return [(axes.at_x(step), axes.at_y(value)) for step, value in shown]


def _of_ranks(find: Callable[..., Any], means: Values) -> Values:
    """Reduce over the ranks that have a value. Return (n,)."""
    found: Values = np.full(means.shape[1], np.nan)
    is_there = np.isfinite(means).any(axis=0)
    if is_there.any():
        found[is_there] = find(means[:, is_there], axis=0)
    return found


def _of_steps(distance: Values) -> npt.NDArray[np.float64]:
    """Return (R,) the mean over the steps of each rank; 0 for ranks without values."""
    is_there = np.isfinite(distance)
    return np.where(is_there, distance, 0.0).sum(axis=1) / np.maximum(is_there.sum(axis=1), 1)


def _last(values: Values) -> float:
    finite = values[np.isfinite(values)]
    return float(finite[-1]) if len(finite) else math.nan
