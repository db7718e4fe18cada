"""Figure of a forecast: step times and samples per second by number of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from ddp_notebook.errors import UsageError
from ddp_notebook.observe.figures.drawing import Picture, fill_style, key, picture
from ddp_notebook.observe.figures.palette import FILLS, INK, LINES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ddp_notebook.observe.forecast.forecast import Forecast

_APART = 2.0  # ratio of two numbers of ranks with a label each
_WIDTH = 0.7  # width of a bar; the distance of two bars is 1


def draw(found: Forecast) -> Picture:
    """Draw the predicted steps as bars, and samples per second as a line, with the measured step in both.

    Args:
        found: a forecast with predictions.

    Raises:
        UsageError: nothing was predicted.

    Example:
        >>> from ddp_notebook.observe.forecast.forecast import forecast
        >>> from tests.observe.synthetic import simulate
        >>> draw(forecast(simulate(), [8, 64])).get_suptitle()
        'A step takes 34.7 ms on 8 ranks (efficiency 97 %), and 34.8 ms on 64 ranks (efficiency 96 %)'
    """
    if not found.predictions or found.measured is None:
        raise UsageError(f"nothing to draw: {found.verdict}")
    figure, (left, right) = picture(found.verdict, 3.6, columns=(1.0, 1.0))
    counts = sorted({found.ranks, *(one.ranks for one in found.predictions)})
    _draw_steps(left, found, counts)
    _draw_rates(right, found, counts)
    dot = Line2D([], [], color=INK, marker="o", linestyle="none", label="measured")
    dashes = Line2D([], [], color=INK, linestyle=(0, (4, 2)), label="as fast as single ranks")
    key(
        figure,
        ["exposed"],
        [Line2D([], [], color=FILLS["compute"].face, linewidth=6, label="rest of the step"), dot, dashes],
    )
    return figure


def _draw_steps(axes: Axes, found: Forecast, counts: list[int]) -> None:
    places = np.array([counts.index(one.ranks) for one in found.predictions])
    exposed = np.array([one.exposed_ns for one in found.predictions]) / 1e6
    rest = np.array([one.step_ns for one in found.predictions]) / 1e6 - exposed
    axes.bar(places, rest, _WIDTH, **fill_style("compute"))
    axes.bar(places, exposed, _WIDTH, bottom=rest, **fill_style("exposed"))
    axes.plot([counts.index(found.ranks)], [found.measured_ns / 1e6], "o", color=INK, markersize=7)
    axes.set_xticks(range(len(counts)), [f"{one:,}" for one in counts])
    axes.set_xlim(-0.6, len(counts) - 0.4)
    axes.set_ylim(bottom=0)
    axes.grid(visible=False, axis="x")
    axes.set_xlabel("ranks")
    axes.set_ylabel("time per step (ms)")


def _draw_rates(axes: Axes, found: Forecast, counts: list[int]) -> None:
    """Draw samples per second, or the speed relative to a single rank if the batch size is unknown."""
    measured = found.measured
    assert measured is not None
    has_samples = measured.samples_per_s is not None
    single = measured.efficiency * measured.ranks

    def rate(one: object) -> float:
        samples, ranks, efficiency = (getattr(one, name) for name in ("samples_per_s", "ranks", "efficiency"))
        return float(samples) if has_samples else float(ranks * efficiency)

    own = rate(measured) / single if has_samples else 1.0  # rate of a single rank
    first = found.predictions[0]
    predicted = rate(first) / (first.ranks * first.efficiency)
    axes.plot(counts, [predicted * one for one in counts], color=INK, linestyle=(0, (4, 2)), linewidth=1.0)
    if abs(predicted / own - 1) > 0.01:  # another batch has another ideal
        axes.plot(counts, [own * one for one in counts], color=INK, linestyle=(0, (1, 2)), linewidth=1.0)
    points = [(one.ranks, rate(one)) for one in found.predictions]
    axes.plot(*zip(*points, strict=True), color=LINES[0], marker=".", linewidth=1.6)
    axes.plot([measured.ranks], [rate(measured)], "o", color=INK, markersize=7)
    axes.set_xscale("log")
    axes.set_yscale("log")
    named = [one for at, one in enumerate(counts) if not at or one >= _APART * counts[at - 1]]
    axes.set_xticks(named, [f"{one:,}" for one in named])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.10g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("ranks")
    axes.set_ylabel("samples/s" if has_samples else "speed, relative to one rank")
