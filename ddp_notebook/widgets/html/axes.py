"""The frame of a chart: positions of values, ticks and their labels.

Charts are drawn in half pixels: `viewBox` is twice as large as the chart appears on a page of the usual width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ddp_notebook.widgets.html.markup import Markup, element, join

WIDTH, HEIGHT = 960, 336
LEFT, RIGHT, TOP, BOTTOM = 100, 926, 14, 270  # edges of the frame
_LONGEST = 6  # characters of a label that fit left of the frame
_LINE = 26  # height of a line of text
_DIGITS = 14  # digits of a tick; removes rounding errors of the multiple of its step
_LEAST_RATIO = 1e-9  # smallest ratio of an axis' length to its values; below it, all values count as equal


@dataclass(frozen=True, slots=True)
class Axes:
    """Value ranges of the axes.

    Args:
        x: First and last value of the x axis.
        y: Lowest and highest drawn value.
        is_log: The y axis is logarithmic; both values of `y` are positive.
    """

    x: tuple[float, float]
    y: tuple[float, float]
    is_log: bool = False

    def at_x(self, value: float) -> int:
        """Return the distance from the left edge of the chart."""
        return round(LEFT + (RIGHT - LEFT) * _part(value, *self.x))

    def at_y(self, value: float) -> int:
        """Return the distance from the top of the chart. Values beyond the axis are moved to its end."""
        low, high = self.y
        if self.is_log:
            value, low, high = (math.log10(max(one, low)) for one in (value, low, high))
        return round(BOTTOM - (BOTTOM - TOP) * min(max(_part(value, low, high), 0.0), 1.0))

    def frame(self, x_label: str, x_ticks: Sequence[tuple[float, str]] | None = None, unit: str = "") -> Markup:
        """Return the grid, the ticks and their labels.

        Args:
            x_label: Label of the x axis.
            x_ticks: Values on the x axis and their labels; None for whole numbers.
            unit: Unit of the y axis, shown at the highest tick, or below its label if that is long.
        """
        y_ticks = log_ticks(*self.y) if self.is_log else ticks(*self.y, 4)
        if x_ticks is None:
            x_ticks = [(value, written(value)) for value in ticks(*self.x, 6) if value == int(value)]
        grid = "".join(f"M{LEFT} {self.at_y(value)}H{RIGHT}" for value in y_ticks)
        below = [_text(self.at_x(value), 298, label, "middle") for value, label in x_ticks]
        labels = [written(value) for value in y_ticks]
        of_unit = []
        if labels and unit:
            if len(with_unit := f"{labels[-1]} {unit}") <= _LONGEST:
                labels[-1] = with_unit
            else:
                of_unit = [_text(LEFT - 8, self.at_y(y_ticks[-1]) + 9 + _LINE, unit, "end")]
        beside = [
            _text(LEFT - 8, self.at_y(value) + 9, label, "end") for value, label in zip(y_ticks, labels, strict=True)
        ]
        middle = (LEFT + RIGHT) // 2
        middle_text = _text(middle, 326, x_label, "middle")
        return join(element("path", class_="grid", d=grid), *beside, *of_unit, *below, middle_text)


def _text(x: int, y: int, text: str, anchor: str) -> Markup:
    return element("text", text, x=x, y=y, text_anchor=anchor)


def _part(value: float, low: float, high: float) -> float:
    return (value - low) / (high - low) if high > low else 0.5


def room(low: float, high: float) -> tuple[float, float]:
    """Return the limits of an axis with a margin around these values, also if they are equal.

    Example:
        >>> room(1.0, 3.0), room(2.0, 2.0), room(0.0, 0.0)
        ((0.9, 3.1), (1.0, 3.0), (-1.0, 1.0))
    """
    length = high - low
    if length <= _LEAST_RATIO * max(abs(low), abs(high)):
        more = abs(high) / 2 or 1.0
    else:
        more = 0.05 * length
    return low - more, high + more


def ticks(low: float, high: float, most: int) -> list[float]:
    """Return at most `most` round values from low to high.

    Example:
        >>> ticks(0.0, 2.31, 4), ticks(0, 4999, 6)
        ([0.0, 1.0, 2.0], [0.0, 1000.0, 2000.0, 3000.0, 4000.0])
    """
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return []
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(step for factor in (1, 2, 5, 10, 20) if (high - low) / (step := factor * power) < most)
    first, last = math.ceil(low / step), math.floor(high / step)
    return [float(f"{number * step:.{_DIGITS}g}") for number in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return at most five powers of ten from low to high.

    Example:
        >>> log_ticks(0.0004, 25.0)
        [0.001, 0.01, 0.1, 1.0, 10.0]
    """
    first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
    return [10.0**power for power in range(first, last + 1, max(1, -(-(last - first + 1) // 5)))]


def written(value: float) -> str:
    """Return the label of a tick.

    Example:
        >>> written(1000.0), written(0.25), written(2e6), written(1e-05)
        ('1000', '0.25', '2e6', '1e-5')
    """
    return f"{value:g}".replace("e+0", "e").replace("e-0", "e-").replace("e+", "e")
