"""Pictures of the stages of a training step: numbers of all ranks before and after."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ddp_notebook.display import FAINT, INK, LINES, ON_PALE, Picture, paler, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ddp_notebook.lessons.ddp.driver import Numbers
    from ddp_notebook.lessons.ddp.stages import Stage

_LABEL = 8.5  # points


def stage(found: Stage) -> Picture:
    """Draw the changes of one stage on the ranks."""
    if found.number == 2:
        return _losses(found)
    if found.number == 3:
        return _filling(found)
    what = {1: "weights", 4: "this bucket", 5: "weights"}[found.number]
    after = {1: "after the broadcast", 4: "after all_reduce: the mean", 5: "after the step"}[found.number]
    before = {1: f"{what} before", 4: f"{what} before: local gradients", 5: f"{what} before"}[found.number]
    return _grids(f"{found.number}. {found.title}", {before: found.before, after: found.after})


def _grids(title: str, sides: Mapping[str, Numbers]) -> Picture:
    """Draw the first elements by rank, with a grid for each side."""
    ranks = max(len(side) for side in sides.values())
    figure, (axes,) = picture(title, 1.15 + 0.3 * ranks)
    largest = max((abs(x) for side in sides.values() for row in side.values() for x in row), default=0) or 1.0
    left = 0.0
    for words, side in sides.items():
        left = _grid(axes, left, words, side, largest) + 1.0
    axes.set_xlim(-1.2, left - 0.9)
    axes.set_ylim(ranks - 0.4, -1.15)
    _bare(axes)
    for row, rank in enumerate(sorted(next(iter(sides.values())))):
        axes.text(-0.15, row, f"rank {rank}", color=INK, ha="right", va="center", fontsize=9)
    for at in range(1, len(sides)):
        width = len(next(iter(next(iter(sides.values())).values()), []))
        x = at * (width + 1.0) - 0.5
        axes.annotate(
            "",
            (x + 0.38, (ranks - 1) / 2),
            (x - 0.38, (ranks - 1) / 2),
            arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 1.5},
        )
    return figure


def _grid(axes: Axes, left: float, words: str, side: Numbers, largest: float) -> float:
    width = max((len(row) for row in side.values()), default=0)
    axes.text(left, -0.85, words, color=INK, fontsize=9, fontweight="bold", va="center")
    for row, rank in enumerate(sorted(side)):
        for column, value in enumerate(side[rank]):
            # The square root makes small values distinguishable.
            share = float(np.sqrt(abs(value) / largest))
            color = paler(LINES[0] if value >= 0 else LINES[1], 0.08 + 0.55 * share)
            axes.barh(row, 0.94, left=left + column + 0.03, height=0.86, color=color)
            axes.text(left + column + 0.5, row, f"{value:.2g}", ha="center", va="center", fontsize=7.5, color=ON_PALE)
    return left + width


def _losses(found: Stage) -> Picture:
    losses = found.losses
    mean = sum(losses.values()) / len(losses)
    figure, (axes,) = picture(f"2. {found.title}; the mean of their losses is {mean:.4f}", 1.0 + 0.3 * len(losses))
    ranks = sorted(losses)
    for row, rank in enumerate(ranks):
        axes.plot([mean, losses[rank]], [row, row], color=LINES[0], linewidth=1.5)
        axes.plot(losses[rank], row, "o", color=LINES[0], markersize=7)
        axes.annotate(
            f"{losses[rank]:.4f}",
            (losses[rank], row),
            (9, 0),
            textcoords="offset points",
            color=INK,
            va="center",
            fontsize=9,
        )
    axes.axvline(mean, color=INK, linewidth=1, linestyle=(0, (4, 3)))
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axes.set_ylim(len(ranks) - 0.4, -0.6)
    axes.margins(x=0.15)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("loss on its own batch; dashed: the mean")
    return figure


def _filling(found: Stage) -> Picture:
    """Draw when each gradient of rank 0 was ready and its bucket, and below it the local gradients."""
    names = [whose for _, what, whose in found.events if what == "gradient"]
    ranks = len(found.before)
    heights = (0.24 * (len(names) + len(found.buckets)) + 0.5, 0.3 * ranks + 0.45)
    figure, (above, below) = picture(f"3. {found.title}", 1.2 + sum(heights), heights)
    bucket_of = {name: at for at, bucket in enumerate(found.buckets) for name in bucket.parameters}
    row = full = 0
    last = max(at for at, _, _ in found.events)
    for at, what, whose in found.events:
        if what == "gradient":
            color = LINES[bucket_of.get(whose, 0) % len(LINES)]
            above.plot([0, at], [row, row], color=FAINT, linewidth=1)
            above.plot(at, row, "o", color=color, markersize=6)
            number = f"bucket {bucket_of[whose]}" if whose in bucket_of else "no bucket"
            above.text(1.03 * last, row, number, color=color, va="center", fontsize=_LABEL)
            row += 1
        else:
            # The line of a bucket ends at its label, and that of a later bucket is higher, so no line crosses a label.
            top = -0.9 - 0.75 * full
            style: dict[str, Any] = {"color": LINES[full % len(LINES)], "linewidth": 1.2, "linestyle": (0, (4, 3))}
            above.plot([at, at], [top, len(names)], **style)
            above.text(at, top, f"bucket {full} is full ", color=INK, fontsize=_LABEL, ha="right", va="center")
            full += 1
    above.set_yticks(range(len(names)), names)
    above.set_ylim(len(names) - 0.4, -1.4 - 0.75 * (full - 1))
    above.set_xlim(0, 1.13 * last)
    above.grid(visible=False, axis="y")
    above.set_xlabel("ms since the backward of rank 0 began; from top to bottom in the order of becoming ready")
    largest = max((abs(x) for row in found.before.values() for x in row), default=0) or 1.0
    right = _grid(below, 0, "the local gradient that every rank has now", found.before, largest)
    below.set_xlim(-0.9, max(right, 8) + 2)
    below.set_ylim(ranks - 0.4, -1.15)
    _bare(below)
    for at, rank in enumerate(sorted(found.before)):
        below.text(-0.1, at, f"rank {rank}", color=INK, ha="right", va="center", fontsize=9)
    return figure


def _bare(axes: Axes) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)
