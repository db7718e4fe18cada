"""Figures with lines: a metric by step, and bandwidth by message size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from ddp_notebook.errors import UsageError
from ddp_notebook.observe.figures.drawing import FAINT, Picture, label_ends, line_style, picture
from ddp_notebook.observe.figures.palette import INK
from ddp_notebook.observe.tables.matching import RowSource, in_cell, label_of, numbers_of
from ddp_notebook.observe.views import Bandwidth, Metric, main_metric
from ddp_notebook.records.names import listed, readable
from ddp_notebook.records.units import at_most_three_figures, size
from ddp_notebook.records.words import list_ranks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_LINES = 16  # ranks that have their own line
_WORST = 3  # lines drawn in addition to the range, for more ranks
_MARKED = 40  # lines with at most this number of points have markers
_LOG_FROM = 100.0  # ratio of the largest to the smallest value above which the axis is logarithmic

Steps = npt.NDArray[np.int64]
Values = npt.NDArray[np.float64]


class Curve(NamedTuple):
    """Logged values of one rank, or of several ranks with equal values."""

    ranks: tuple[int, ...]
    steps: Steps  # (n,)
    values: Values  # (n,)

    @property
    def end(self) -> float:
        return float(self.values[-1])


# ---- a metric


def loss(recording: RowSource, metrics: Mapping[str, Metric], name: str | None, cell: int | None) -> Picture:
    """Draw `figures.loss`."""
    metric = _choose(metrics, name)
    if cell is not None and cell not in metric.cells:
        known = numbers_of(recording, np.unique(metric.cells).tolist())
        where = f"cell{'s' * (len(known) > 1)} {', '.join(known)}"
        raise UsageError(f"{readable(metric.name)} was not recorded in cell {cell}, but in {where}")
    lines, shown_cell = lines_of(metric, cell)
    where = "" if shown_cell is None else f" ({label_of(recording, shown_cell)})"
    unit = metric.unit_of(shown_cell)
    figure, (axes,) = picture(_title(metric.name, lines, where, unit), 4.2)
    ends = draw_metric(axes, metric.name, lines, unit)
    figure.draw_without_rendering()  # positions of labels depend on the final position of the axes
    label_ends(axes, ends)
    return figure


def draw_metric(
    axes: Axes, name: str, lines: Sequence[Curve], unit: str, most: int = _MOST_LINES
) -> list[tuple[float, float, str, str]]:
    """Draw a line for each rank, or the range of all if there are more than `most`. Return the line ends for
    `label_ends`.

    Args:
        unit: unit of the steps, see `Metric.unit_of`.
    """
    ends = _draw_ranks(axes, lines, unit) if len(lines) <= most else _draw_range(axes, lines, unit)
    finite = np.concatenate([line.values[np.isfinite(line.values)] for line in lines])
    if len(finite) and finite.min() > 0 and finite.max() / finite.min() > _LOG_FROM:
        axes.set_yscale("log")
    axes.set_xlabel(unit)
    axes.set_ylabel(name)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return ends


def _choose(metrics: Mapping[str, Metric], name: str | None) -> Metric:
    if not metrics:
        raise UsageError(
            "nothing to draw: no metric was recorded; write log(loss=loss) in the cell, "
            "or run it with %%on_all_ranks --watch loss"
        )
    name = main_metric(metrics) if name is None else name
    if name not in metrics:
        raise UsageError(f"metric {name!r} was not recorded; the recorded metrics are {listed(metrics)}")
    return metrics[name]


def lines_of(metric: Metric, cell: int | None) -> tuple[list[Curve], int | None]:
    """Return the lines of a metric, and the cell to which they are restricted."""
    if cell is None and not metric.is_continued:
        cell = int(metric.cells.max())
    chosen = np.ones(len(metric.values), bool) if cell is None else metric.cells == cell
    by_values: dict[tuple[bytes, bytes], list[int]] = {}  # all ranks have equal values of an averaged metric
    for rank in np.unique(metric.ranks[chosen]).tolist():
        mine = np.flatnonzero(chosen & (metric.ranks == rank))
        mine = mine[np.argsort(metric.steps[mine], kind="stable")]
        steps, values = metric.steps[mine].astype(np.int64), metric.values[mine].astype(np.float64)
        by_values.setdefault((steps.tobytes(), values.tobytes()), []).append(rank)
    lines = [
        Curve(tuple(ranks), np.frombuffer(steps, np.int64), np.frombuffer(values, np.float64))
        for (steps, values), ranks in by_values.items()
    ]
    return lines, cell


def _draw_ranks(axes: Axes, lines: Sequence[Curve], unit: str) -> list[tuple[float, float, str, str]]:
    ends = []
    for at, line in enumerate(lines):
        style = line_style(at)
        marker = "." if len(line.steps) <= _MARKED and len(lines) <= 8 else ""
        axes.plot(line.steps, line.values, linewidth=1.4, marker=marker, **style)
        finite = np.flatnonzero(np.isfinite(line.values))
        x, y = (line.steps[finite[-1]], line.values[finite[-1]]) if len(finite) else (line.steps[-1], np.nan)
        if len(finite) < len(line.values):  # the last finite value before the first one that is not finite
            axes.plot([x], [y], marker="x", markersize=9, markeredgewidth=2, **style)
        ends.append((float(x), float(y), _label(line, unit), str(style["color"])))
    return ends


def _draw_range(axes: Axes, lines: Sequence[Curve], unit: str) -> list[tuple[float, float, str, str]]:
    steps, values = _table(lines)
    low, middle, high = np.nanmin(values, axis=0), np.nanmedian(values, axis=0), np.nanmax(values, axis=0)
    ranks = sum(len(line.ranks) for line in lines)
    axes.fill_between(steps, low, high, color=FAINT, linewidth=0)
    axes.plot(steps, middle, color=INK, linewidth=2)
    worst = _furthest(lines, values, middle)
    ends = _draw_ranks(axes, worst, unit)
    axes.text(
        0.99,
        0.97,
        f"band: the range of {ranks} ranks",
        transform=axes.transAxes,
        ha="right",
        va="top",
        color=INK,
        fontsize=9,
    )
    return [*ends, (float(steps[-1]), float(middle[-1]), "median", INK)]


def _table(lines: Sequence[Curve]) -> tuple[Steps, Values]:
    """Return the steps (n,) with a finite value, and the values (len(lines), n), NaN if a rank has none."""
    steps = np.unique(np.concatenate([line.steps for line in lines]))
    values = np.full((len(lines), len(steps)), np.nan)
    for row, line in zip(values, lines, strict=True):
        row[np.searchsorted(steps, line.steps)] = np.where(np.isfinite(line.values), line.values, np.nan)
    is_known = np.isfinite(values).any(axis=0)
    return (steps[is_known], values[:, is_known]) if is_known.any() else (steps[:1], np.zeros((len(lines), 1)))


def _furthest(lines: Sequence[Curve], values: Values, middle: Values) -> list[Curve]:
    """Return the lines with values that are not finite, then those with the largest mean distance from the median."""
    distance = np.abs(values - middle)
    known = np.isfinite(distance)
    mean = np.where(known, distance, 0.0).sum(axis=1) / np.maximum(known.sum(axis=1), 1)
    order = sorted(range(len(lines)), key=lambda at: (np.isfinite(lines[at].values).all(), -mean[at]))
    return [lines[at] for at in order[:_WORST]]


def _label(line: Curve, unit: str) -> str:
    label = list_ranks(line.ranks)
    wrong = line.values[~np.isfinite(line.values)]
    if len(wrong):
        return f"{label}: {wrong[0]:g} from {unit} {_first_wrong(line)}"
    return f"{label}: {at_most_three_figures(line.end)}"


def _first_wrong(line: Curve) -> int:
    return int(line.steps[np.flatnonzero(~np.isfinite(line.values))[0]])


def _title(name: str, lines: Sequence[Curve], where: str, unit: str) -> str:
    wrong = [line for line in lines if not np.isfinite(line.values).all()]
    if wrong:
        first = min(wrong, key=_first_wrong)
        value = first.values[~np.isfinite(first.values)][0]
        ranks = [rank for line in wrong if _first_wrong(line) == _first_wrong(first) for rank in line.ranks]
        return f"{name} becomes {value:g} at {unit} {_first_wrong(first)} on {list_ranks(ranks)}{where}"
    weights = [len(line.ranks) for line in lines]
    begin = float(np.average([line.values[0] for line in lines], weights=weights))
    end = float(np.average([line.end for line in lines], weights=weights))
    count = len(np.unique(np.concatenate([line.steps for line in lines])))
    if count == 1:
        course = f"{name} is {end:.3g}"
    elif abs(end - begin) <= 0.005 * max(abs(begin), abs(end)):
        course = f"{name} stays at {end:.3g} for {count} {unit}s"
    else:
        course = f"{name} {'falls' if end < begin else 'rises'} from {begin:.3g} to {end:.3g} in {count} {unit}s"
    ends = [line.end for line in lines]
    if len(lines) > 1 and f"{min(ends):.3g}" != f"{max(ends):.3g}":
        return f"{course}; at the end the ranks are between {min(ends):.3g} and {max(ends):.3g}{where}"
    return f"{course}{', the same on all ranks' if sum(weights) > 1 and len(lines) == 1 else ''}{where}"


# ---- bandwidth


def bandwidth(recording: RowSource, found: Sequence[Bandwidth], cell: int | None) -> Picture:
    """Draw `figures.bandwidth`."""
    found = [one for one in found if one.bus_gb_s > 0]
    if not found:
        raise UsageError(
            f"nothing to draw: no transfer between ranks was recorded{in_cell(recording, cell)}; run a cell "
            "that communicates, with %ddp_record meta or values"
        )
    best = max(found, key=lambda one: one.bus_gb_s)
    where = "" if cell is None else f" ({label_of(recording, cell)})"
    title = f"{best.op} reaches {best.bus_gb_s:.2g} GB/s of bus bandwidth at {size(best.nbytes)}{where}"
    figure, (axes,) = picture(title, 4.2)
    axes.set_xscale("log")
    axes.set_yscale("log")
    series: dict[tuple[str, str, int], list[Bandwidth]] = {}
    for one in found:
        series.setdefault((one.op, one.group, one.world_size), []).append(one)
    groups = {group for _, group, _ in series}
    ends = []
    for at, ((op, group, world_size), points) in enumerate(series.items()):
        style = line_style(at)
        x, y = [one.nbytes for one in points], [one.bus_gb_s for one in points]
        axes.plot(x, y, marker="o", markersize=5, linewidth=1.4, **style)
        label = f"{op}, {world_size} ranks" if len(groups) == 1 else f"{op}, {group}, {world_size} ranks"
        ends.append((x[-1], y[-1], label, str(style["color"])))
    _log_limits(axes, found)
    axes.set_xlabel("message size (bytes)")
    axes.set_ylabel("bus bandwidth (GB/s)")
    figure.draw_without_rendering()
    label_ends(axes, ends)
    return figure


def _log_limits(axes: Axes, found: Sequence[Bandwidth]) -> None:
    """Set axis limits with room around the points, at least a decade in total, and plain tick labels."""
    for axis, values, words in (
        (axes.xaxis, [one.nbytes for one in found], lambda value, _: size(value).replace(".0 ", " ")),
        (axes.yaxis, [one.bus_gb_s for one in found], lambda value, _: f"{value:g}"),
    ):
        low, high = float(min(values)), float(max(values))
        room = max(1.6, (10 * low / high) ** 0.5)
        axis.set_view_interval(low / room, high * room, ignore=True)
        axis.set_major_locator(LogLocator(subs=(1.0,) if high / low > 30 else (1.0, 2.0, 5.0)))
        axis.set_major_formatter(FuncFormatter(words))
        axis.set_minor_formatter(NullFormatter())
