"""Draw a column for each rank: its number, and below it cells with values.

Each rank has a colour. The colours below a number show the ranks whose data it contains. A right or wrong guess has a
mark and a solid or dashed frame, and no colour, because colours mean ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ddp_notebook.display import INK, LINES

CELL_IN = 0.27  # height of a cell
_WIDE = 0.94  # width of a cell, relative to its column


def bare(axes: Axes, columns: int, height: float) -> None:
    axes.set(xlim=(-0.02, columns), ylim=(height, 0), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    axes.set_facecolor("none")


def head(axes: Axes, rank: int, words: str) -> None:
    axes.text(rank + _WIDE / 2, 0.45, words, ha="center", va="center", fontsize=9, color=INK, fontweight="bold")


def cell(
    axes: Axes,
    rank: int,
    y: float,
    value: Any,
    who: Sequence[int],
    guess: tuple[float, bool] | None = None,
    is_new: bool = False,
) -> None:
    """Draw a number with the colours of the ranks whose data it contains.

    Args:
        guess: Guessed value, and whether it is right; None without a guess.
        is_new: Emphasize the cell, because it has just changed.
    """
    width = _WIDE / max(len(who), 1)
    for at, one in enumerate(who):  # a strip below the number, which is drawn on the background of the page
        axes.add_patch(Rectangle((rank + at * width, y + 0.74), width, 0.18, facecolor=LINES[one % len(LINES)], lw=0))
    is_wrong = guess is not None and not guess[1]
    thick = 1.8 if is_new or guess is not None else 0.5
    frame = Rectangle((rank, y), _WIDE, 0.92, facecolor="none", edgecolor=INK, lw=thick, ls="--" if is_wrong else "-")
    axes.add_patch(frame)
    words = value if isinstance(value, str) else number(value)
    if guess is not None:
        words = f"\N{CHECK MARK} {words}" if guess[1] else f"{words}, guessed {number(guess[0])} \N{BALLOT X}"
    weight = "bold" if is_new else "normal"
    place = (rank + _WIDE / 2, y + 0.38)
    axes.text(*place, words, ha="center", va="center", fontsize=8.5, color=INK, fontweight=weight)


def legend(figure: Figure, world_size: int, note: str = "") -> None:
    """Add a note and a legend of the colours of the ranks below a figure."""
    handles = [
        Rectangle((0, 0), 1, 1, color=LINES[rank % len(LINES)], label=f"{'data of ' * (not rank)}rank {rank}")
        for rank in range(world_size)
    ]
    found = figure.legend(handles=handles, loc="outside lower left", ncols=8, frameon=False, fontsize=9,
                          labelcolor=INK, handlelength=1.2, columnspacing=1.2, title=note, title_fontsize=9,
                          alignment="left")  # fmt: skip
    found.get_title().set_color(INK)


def number(value: Any) -> str:
    number = float(value)
    return f"{number:.0f}" if number == round(number) and abs(number) < 1e7 else f"{number:.4g}"
