"""Draw a column for each rank: its number, and below it cells with values.

Each rank has a colour. The colours of a cell, and the numbers in its corner, show the ranks whose data it contains.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from ddp_notebook.display import INK, LINES
from ddp_notebook.records.words import format_ranks

CELL_IN = 0.27  # height of a cell
_RIGHT, _WRONG = "#009E73", "#D55E00"
_WIDE = 0.94  # width of a cell, relative to its column


def bare(axes: Axes, columns: int, height: float) -> None:
    axes.set(xlim=(-0.02, columns), ylim=(height, 0), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    axes.set_facecolor("none")


def head(axes: Axes, rank: int, words: str) -> None:
    axes.text(rank + _WIDE / 2, 0.45, words, ha="center", va="center", fontsize=9, color=INK, fontweight="bold")


def cell(
    axes: Axes, rank: int, y: float, value: Any, who: Sequence[int], mark: bool | None = None, is_new: bool = False
) -> None:
    """Draw a number with the colours of the ranks whose data it contains."""
    width = _WIDE / max(len(who), 1)
    for at, one in enumerate(who):  # a strip below the number, which is drawn on the background of the page
        axes.add_patch(Rectangle((rank + at * width, y + 0.74), width, 0.18, facecolor=LINES[one % len(LINES)], lw=0))
    edge = INK if mark is None else _RIGHT if mark else _WRONG
    thick = 2.0 if mark is not None else 1.8 if is_new else 0.5
    axes.add_patch(Rectangle((rank, y), _WIDE, 0.92, facecolor="none", edgecolor=edge, lw=thick))
    sign = "" if mark is None else "  right" if mark else "  wrong"
    words = value if isinstance(value, str) else number(value)
    weight = "bold" if is_new else "normal"
    place = (rank + _WIDE / 2, y + 0.38)
    axes.text(*place, f"{words}{sign}", ha="center", va="center", fontsize=8.5, color=INK, fontweight=weight)
    if len(who) > 1:
        axes.text(rank + _WIDE - 0.02, y + 0.7, format_ranks(who), ha="right", va="bottom", fontsize=5.5, color=INK)


def number(value: Any) -> str:
    number = float(value)
    return f"{number:.0f}" if number == round(number) and abs(number) < 1e7 else f"{number:.4g}"
