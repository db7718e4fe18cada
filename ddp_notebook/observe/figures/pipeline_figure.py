"""Figure of a pipeline: measured actions above, and below the same actions if messages took no time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ddp_notebook.observe.figures.drawing import Picture, fill_style, key, paler, picture, text_on
from ddp_notebook.observe.figures.palette import INK, ON_PALE
from ddp_notebook.observe.views import Action, Pipeline
from ddp_notebook.records.units import ms, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROW = 0.3  # inches
_PALER = 0.45  # share of the colour that each further stage of a rank loses, down to `_PALEST`
_PALEST = 0.35
_LEAST_NAMED = 0.012  # least share of the width at which an action has room for its number
_ORDER = ("forward", "backward", "input gradient", "weight gradient", "bubble")


def pipeline(shown: Pipeline) -> Picture:
    """Draw `figures.pipeline`."""
    rows = len(shown.ranks)
    sizes = _count(shown.stages, "stage", "s"), _count(shown.microbatches, "microbatch", "es")
    title = f"{shown.schedule.removeprefix('Schedule')}, {sizes[0]}, {sizes[1]}: "
    title += f"bubble {percent(shown.bubble)}, {percent(shown.ideal_bubble)} if messages took no time"
    figure, (above, below) = picture(title, 2 * _ROW * max(rows, 2) + 1.9, (1.0, 1.0))
    longest = max(shown.span_ns, shown.ideal_span_ns)
    _draw(above, shown, shown.actions, "measured", longest)
    _draw(below, shown, shown.ideal, "without messages", longest)
    below.set_xlabel("time (ms)")
    above.tick_params(labelbottom=False)
    kinds = {one.kind for one in shown.actions} | {"bubble"}
    key(figure, [kind for kind in _ORDER if kind in kinds])
    return figure


def _draw(axes: Axes, shown: Pipeline, actions: Sequence[Action], words: str, longest_ns: int) -> None:
    zero = min(one.start_ns for one in actions)
    until = max(one.end_ns for one in actions) - zero
    row_of = {rank: row for row, rank in enumerate(shown.ranks)}
    stages = {rank: sorted({one.stage for one in actions if one.rank == rank}) for rank in shown.ranks}
    axes.barh([*row_of.values()], until / 1e6, height=0.8, **fill_style("bubble"))
    alike: dict[tuple[str, float], list[Action]] = {}
    for one in actions:
        share = max(1 - _PALER * stages[one.rank].index(one.stage), _PALEST)
        alike.setdefault((one.kind, share), []).append(one)
    for (kind, share), some in alike.items():  # one call for many bars, because each call takes 3 ms
        lefts = [(one.start_ns - zero) / 1e6 for one in some]
        widths = [(one.end_ns - one.start_ns) / 1e6 for one in some]
        rows = [row_of[one.rank] for one in some]
        style = fill_style(kind)
        # Mixed with white and opaque, because the number is dark, and the page may be dark.
        style |= {"facecolor": paler(style["facecolor"], share), "edgecolor": INK, "linewidth": 0.5}
        axes.barh(rows, widths, left=lefts, height=0.8, **style)
        color = text_on(kind) if share > 0.8 else ON_PALE
        for one, row, left, width in zip(some, rows, lefts, widths, strict=True):
            if width > _LEAST_NAMED * longest_ns / 1e6:
                axes.text(left + width / 2, row, str(one.microbatch), color=color, ha="center", va="center", fontsize=8)
    axes.set_yticks(range(len(shown.ranks)), [f"rank {rank}" for rank in shown.ranks])
    axes.set_ylim(len(shown.ranks) - 0.5, -0.5)
    axes.set_xlim(0, longest_ns / 1e6)
    axes.grid(visible=False)
    axes.set_title(f"{words}: {ms(until)}", loc="left", fontsize=9, color=INK)


def _count(number: int, word: str, many: str) -> str:
    return f"{number} {word}{many if number != 1 else ''}"
