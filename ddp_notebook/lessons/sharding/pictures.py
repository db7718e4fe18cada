"""The pictures that stay of `lessons.product` and `lessons.mesh`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddp_notebook.display import INK, LINES, Picture, picture
from ddp_notebook.records.units import size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ddp_notebook.lessons.sharding.product import Held, Product
    from ddp_notebook.lessons.sharding.training import MeshTraining

_WAYS = {"row": LINES[0], "column": LINES[1]}


def product(lesson: Product) -> Picture:
    """Each matrix, its elements in the colours of the ranks that hold them; partial sums are hatched."""
    from matplotlib.patches import Rectangle

    title = lesson.said[0] if lesson.has_run else f"A is {lesson.of_a}, B is {lesson.of_b}: not multiplied yet"
    widths = [one.placement.shape[1] for one in lesson.held]
    figure, panels = picture(title, 0.9 + 0.3 * max(one.placement.shape[0] for one in lesson.held), columns=widths)
    for axes, held in zip(panels, lesson.held, strict=True):
        _matrix(axes, held)
    colours = [LINES[rank % len(LINES)] for rank in range(lesson.world_size)]
    marks = [Rectangle((0, 0), 1, 1, color=colour, label=f"rank {rank}") for rank, colour in enumerate(colours)]
    figure.legend(
        handles=marks, loc="outside lower center", ncols=len(marks), frameon=False, fontsize=8, labelcolor=INK
    )
    return figure


def _matrix(axes: Axes, held: Held) -> None:
    from matplotlib.patches import Rectangle

    placement = held.placement
    rows, columns = placement.shape
    holders: dict[tuple[int, int], list[int]] = {}
    for rank, part in placement.parts.items():
        for r in range(part.size[0]):
            for c in range(part.size[1]):
                holders.setdefault((part.offset[0] + r, part.offset[1] + c), []).append(rank)
    for (r, c), ranks in holders.items():
        for at, rank in enumerate(ranks):  # an element that several ranks hold has a stripe for each
            wide, colour = 1 / len(ranks), LINES[rank % len(LINES)]
            hatch: dict[str, Any] = {"alpha": 0.45, "hatch": "///", "edgecolor": colour} if placement.is_partial else {}
            axes.add_patch(Rectangle((c + at * wide, r), wide, 1, facecolor=colour, linewidth=0, **hatch))
        axes.add_patch(Rectangle((c, r), 1, 1, facecolor="none", edgecolor=INK, linewidth=0.4))
    axes.set(xlim=(0, columns), ylim=(rows, 0), xticks=[], yticks=[], aspect="equal")
    axes.set_title(f"{held.name}: {', '.join(placement.placements)}", color=INK, fontsize=9.5)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)


def mesh(lesson: MeshTraining) -> Picture:
    """The grid of the ranks; the width of a line is the number of bytes of a rank that went along it in one step."""
    title = lesson.said[0] if lesson.has_run else f"{lesson.rows} x {lesson.columns} ranks: not trained yet"
    figure, (axes,) = picture(title, 1.3 + 0.8 * lesson.rows)
    moved = lesson.nbytes()
    total = {way: sum(nbytes for _, nbytes in of.values()) for way, of in moved.items()}
    for way, nbytes in total.items():
        if not nbytes:
            continue
        thick = 2 + 10 * nbytes / max(total.values())
        style: dict[str, Any] = {"color": _WAYS[way], "linewidth": thick, "alpha": 0.6, "solid_capstyle": "round"}
        for line in range(lesson.rows if way == "row" else lesson.columns):
            along, across = [0, (lesson.columns if way == "row" else lesson.rows) - 1], [line, line]
            axes.plot(*((along, across) if way == "row" else (across, along)), zorder=1, **style)
        what = ", ".join(f"{count} x {purpose}" for purpose, (count, _) in moved[way].items())
        axes.plot([], [], label=f"{way}: {what}; {size(nbytes)}", **{**style, "linewidth": 5})
    for rank in range(lesson.world_size):
        r, c = divmod(rank, lesson.columns)
        axes.scatter(c, r, s=520, facecolor="white", edgecolor=LINES[rank % len(LINES)], linewidth=2, zorder=2)
        axes.text(c, r, str(rank), ha="center", va="center", fontsize=11, color="#333", zorder=3)
    axes.set(xlim=(-0.6, lesson.columns - 0.4), ylim=(lesson.rows - 0.5, -0.5), xticks=[], yticks=[])
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    if any(total.values()):
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.02), frameon=False, fontsize=8.5, labelcolor=INK)
    return figure
