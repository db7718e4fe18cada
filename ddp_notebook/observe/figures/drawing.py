"""Style of figures: colours with a fixed meaning, and axes that are readable on light and on dark pages.

This module imports matplotlib, so import it only to draw. It never imports pyplot, whose state belongs to the user.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from matplotlib import font_manager
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import to_rgb, to_rgba
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.ticker import LogFormatter, ScalarFormatter

from ddp_notebook.observe.figures.palette import ACTIONS, FILLS, INK, LINES, ON_LINES, ON_PALE

FAINT = (0.5, 0.5, 0.5, 0.25)  # colour of the grid and of bands

_MEANINGS = FILLS | ACTIONS
_DPI = 200  # resolution of the PNG; shown at half of it, to be sharp on high-resolution screens
_WIDTH = 8.4  # inches
_LABEL_PT = 9.0
_UNREADABLE = "\N{REPLACEMENT CHARACTER}"


class Picture(Figure):
    """A figure that a notebook shows although it was not created by pyplot.

    Its texts are not parsed as formulas, because users choose some of the names.
    """

    def draw(self, renderer: Any) -> None:
        """Draw the figure. All output and measurement of matplotlib uses this method."""
        formulas = {id(label) for axes in self.axes for axis in (axes.xaxis, axes.yaxis) for label in _of_ticks(axis)}
        originals: list[tuple[Text, str]] = []  # texts that are changed for this drawing only
        for text in self.findobj(Text):
            assert isinstance(text, Text)
            text.set_usetex(False)
            if id(text) not in formulas:
                text.set_parse_math(False)
            words = text.get_text()
            if not words.isascii() or not words.isprintable():
                words = _in_font(words, text.get_fontproperties())
                text.set_text(words)
            if text.get_wrap() and "$" in words:  # matplotlib measures wrapped texts as formulas
                originals.append((text, words))
                text.set_parse_math(True)
                text.set_text(words.replace("$", r"\$"))
        for axes in self.axes:
            label = axes.yaxis.label
            originals.append((label, label.get_text()))
            _shorten(label, axes.get_window_extent(renderer).height, renderer)
        super().draw(renderer)
        for text, words in originals:
            text.set_text(words)

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        data = io.BytesIO()
        self.savefig(data, format="png", dpi=_DPI)
        width, height = self.get_size_inches()
        return data.getvalue(), {"width": round(width * _DPI / 2), "height": round(height * _DPI / 2)}


def _in_font(words: str, font: FontProperties) -> str:
    """Replace characters that are unprintable or missing in the fonts. Matplotlib would warn about them."""
    fonts = [font_manager.get_font(font_manager.findfont(one)) for one in _each_family(font)]
    shown = (one == "\n" or (one.isprintable() and any(has.get_char_index(ord(one)) for has in fonts)) for one in words)
    return "".join(one if is_shown else _UNREADABLE for one, is_shown in zip(words, shown, strict=True))


def _each_family(font: FontProperties) -> list[FontProperties]:
    """Return the installed fonts in which matplotlib looks for a character."""
    found = []
    for family in font.get_family():
        one = font.copy()
        one.set_family(family)
        with contextlib.suppress(ValueError):
            font_manager.findfont(one, fallback_to_default=False)
            found.append(one)
    return found or [font]


def _shorten(label: Text, most: float, renderer: Any) -> None:
    """Shorten the label of a vertical axis to a height in pixels."""
    words = label.get_text()
    height = label.get_window_extent(renderer).height
    while height > most and len(words) > 1:
        words = words[: max(1, min(len(words) - 1, int(len(words) * most / height)))]
        label.set_text(f"{words.rstrip()}\N{HORIZONTAL ELLIPSIS}")
        height = label.get_window_extent(renderer).height


def picture(
    title: str,
    height: float,
    rows: Sequence[float] = (1.0,),
    columns: Sequence[float] = (1.0,),
    *,
    layout: Literal["constrained"] | None = "constrained",
    title_pt: float = 11.0,
) -> tuple[Picture, list[Axes]]:
    """Create an empty figure with a transparent background.

    Args:
        title: the result as text.
        height: inches.
        rows: relative heights of the axes below each other.
        columns: relative widths of the axes side by side.
        layout: None if the caller positions the axes, which takes a third of the time.
    """
    figure = Picture(figsize=(_WIDTH, height), layout=layout, facecolor="none")
    figure.suptitle(title, x=0.01, ha="left", fontsize=title_pt, fontweight="bold", color=INK, wrap=True)
    ratios: dict[str, Any] = {"height_ratios": list(rows), "width_ratios": list(columns)}
    axes: list[Axes] = list(figure.subplots(len(rows), len(columns), squeeze=False, **ratios).ravel())
    for one in axes:
        _dress(one)
    return figure, axes


def _of_ticks(axis: Axis) -> list[Text]:
    """Return the tick labels that matplotlib writes itself, such as powers of ten. They are formulas."""
    found = [axis.get_offset_text()]
    for formatter, ticks in (
        (axis.get_major_formatter(), axis.get_major_ticks()),
        (axis.get_minor_formatter(), axis.get_minor_ticks()),
    ):
        if isinstance(formatter, LogFormatter | ScalarFormatter):
            found += [label for tick in ticks for label in (tick.label1, tick.label2)]
    return found


def _dress(axes: Axes) -> None:
    axes.set_facecolor("none")
    axes.tick_params(which="both", colors=INK, labelsize=_LABEL_PT)
    axes.spines[["top", "right"]].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(INK)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_color(INK)
        label.set_fontsize(_LABEL_PT + 0.5)
    axes.grid(color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)


def line_style(index: int) -> dict[str, Any]:
    """Return colour and dashes of the line with this index."""
    return {"color": LINES[index % len(LINES)], "linestyle": "-" if index // len(LINES) % 2 == 0 else (0, (4, 1.5))}


def fill_style(meaning: str) -> dict[str, Any]:
    """Return the style of a bar or area with this meaning."""
    fill = _MEANINGS[meaning]
    return {
        "facecolor": to_rgba(fill.face),
        "edgecolor": to_rgba(fill.edge),
        "hatch": fill.hatch or None,
        "linewidth": 0.8 if fill.edge != "none" and not fill.hatch else 0.0,
    }


def paler(color: Any, share: float) -> tuple[float, ...]:
    """Mix a colour with white, to be light enough for dark numbers on any page.

    Args:
        share: share of the colour, 0 to 1.
    """
    return tuple(1 - share * (1 - part) for part in to_rgb(color))


def key(
    figure: Figure,
    meanings: Sequence[str],
    more: Sequence[Artist] = (),
    *,
    is_placed: bool = False,
    words: Mapping[str, str] | None = None,
) -> None:
    """Add a legend of the colours, in rows below the figure.

    Args:
        is_placed: the caller has left room for it.
        words: labels by meaning, instead of the usual ones.
    """
    labels = {meaning: _MEANINGS[meaning].words for meaning in meanings} | dict(words or {})
    patches = [Patch(label=labels[meaning], **fill_style(meaning)) for meaning in meanings]
    legend = figure.legend(
        handles=[*patches, *more],
        loc="lower left" if is_placed else "outside lower left",
        ncols=4 if words is None else 2,
        frameon=False,
        fontsize=_LABEL_PT,
        labelcolor=INK,
        handlelength=1.4,
        columnspacing=1.4,
    )
    legend.set_in_layout(True)


def text_on(meaning: str) -> str:
    """Return a colour for text on an area with this meaning."""
    red, green, blue, opacity = to_rgba(_MEANINGS[meaning].face)
    if opacity < 0.5:
        return INK
    return ON_PALE if 0.3 * red + 0.59 * green + 0.11 * blue > 0.6 else ON_LINES


def label_ends(axes: Axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Add labels to the right of line ends, moved apart so that they do not overlap.

    Args:
        ends: x and y of each line's end in data coordinates, label, colour. NaN is placed at the bottom.
    """
    # in points; an inner figure may be part of the outer one
    height = axes.get_window_extent().height / axes.figure.figure.dpi * 72
    step = (_LABEL_PT + 1.5) / height  # relative to the axes' height
    wanted = [_part(axes, y) for _, y, _, _ in ends]
    order = sorted(range(len(ends)), key=lambda at: wanted[at])
    for at, place in zip(order, spread([wanted[at] for at in order], step, 1.0), strict=True):
        x, y, text, color = ends[at]
        axes.annotate(
            text,
            (x, y) if y == y else (x, axes.get_ylim()[0]),
            xytext=(1.02, place),
            textcoords="axes fraction",
            color=color,
            fontsize=_LABEL_PT,
            va="center",
            arrowprops={
                "arrowstyle": "-",
                "color": color,
                "linewidth": 0.5,
                "alpha": 0.6,
                "relpos": (0.0, 0.5),
                "shrinkA": 2,
                "shrinkB": 1,
            },
            annotation_clip=False,
        )


def spread(places: Sequence[float], step: float, top: float) -> list[float]:
    """Move ascending positions apart to at least `step`, each group around its middle, between 0 and `top`.

    Example:
        >>> [round(place, 2) for place in spread([0.5, 0.5, 0.5, 0.9], 0.1, 1.0)]
        [0.4, 0.5, 0.6, 0.9]
        >>> [round(place, 2) for place in spread([0.0, 0.0, 0.98, 1.0], 0.1, 1.0)]
        [0.0, 0.1, 0.9, 1.0]
    """
    groups: list[tuple[float, int]] = []  # middle, number of positions
    for place in places:
        middle, count = place, 1
        while groups and middle - groups[-1][0] < step * (count + groups[-1][1]) / 2:
            before, more = groups.pop()
            middle, count = (middle * count + before * more) / (count + more), count + more
        groups.append((middle, count))
    found = [middle + step * (at - (count - 1) / 2) for middle, count in groups for at in range(count)]
    found = [max(place, step * at) for at, place in enumerate(found)]
    return [min(place, top - step * (len(found) - 1 - at)) for at, place in enumerate(found)]


def _part(axes: Axes, y: float) -> float:
    """Return the position of a value on the axis: 0 at the bottom, 1 at the top."""
    if y != y:
        return 0.0
    place = axes.transAxes.inverted().transform(axes.transData.transform((axes.get_xlim()[0], y)))[1]
    return float(min(max(place, 0.0), 1.0))
