"""The pictures that stay in saved notebooks. Colours are the ranks' own, and numbers say whose data a cell has."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.patches import FancyArrowPatch, Rectangle
from matplotlib.ticker import FuncFormatter

from ddp_notebook.display import FAINT, INK, LINES, Picture, picture
from ddp_notebook.lessons.algorithms import plans
from ddp_notebook.lessons.collectives import theory
from ddp_notebook.records.units import size
from ddp_notebook.records.words import format_ranks

if TYPE_CHECKING:
    from ddp_notebook.lessons.algorithms.stepping import Stepper
    from ddp_notebook.lessons.collectives.costs import Costs
    from ddp_notebook.lessons.collectives.explorer import Explorer
    from ddp_notebook.lessons.messages.messages import Scene

_RIGHT, _WRONG = "#009E73", "#D55E00"
_CELL_IN = 0.27  # height of a cell
_WIDE = 0.94  # of a column that a cell takes


def collective(explorer: Explorer) -> Picture:
    """Before and after, a column for each rank."""
    call = explorer.call
    inputs = {rank: explorer.inputs[rank] for rank in call.ranks}
    who = theory.contributors(call)
    values: Any = explorer.result if explorer.result is not None else explorer.expected()
    highest = max((len(one) for one in inputs.values()), default=1) or 1
    deepest = max((len(values.get(rank, ())) for rank in call.ranks), default=1) or 1
    figure, (axes,) = picture(explorer.line, 0.95 + _CELL_IN * (highest + deepest + 2.2))
    _bare(axes, call.world_size, highest + deepest + 2.2)
    marks = {} if explorer.result is None else {r: of for r, of in explorer.right.items() if r in explorer.prediction}
    for rank in range(call.world_size):
        _head(axes, rank, f"rank {rank}" + ("" if rank in call.ranks else ": not in the group"))
        for at, value in enumerate(inputs.get(rank, ())):
            _cell(axes, rank, 0.9 + at, value, (rank,))
        top = highest + 2.1
        for at, value in enumerate(values.get(rank, ())):
            mark = marks[rank][at] if rank in marks and at < len(marks[rank]) else None
            _cell(axes, rank, top + at, value, who[rank][at] if at < len(who.get(rank, ())) else (), mark)
    state = "after, on the ranks" if explorer.result is not None else "after, says NumPy (not run yet)"
    axes.text(-0.08, 0.9 + highest / 2, "before", ha="right", va="center", color=INK, fontsize=9)
    axes.text(-0.08, highest + 2.1 + deepest / 2, state.split(",")[0], ha="right", va="center", color=INK, fontsize=9)
    axes.text(0.03, highest + 1.5, f"{explorer.formula}    [{state}]", va="center", color=INK, fontsize=9)
    return figure


def steps(stepper: Stepper) -> Picture:
    """The chunks of every rank after each step, and the bytes over each link."""
    shown = stepper.states if len(stepper.states) <= 8 else [*stepper.states[:4], *stepper.states[-4:]]
    numbers = [stepper.states.index(one) for one in shown]
    n = stepper.world_size
    columns = min(4, len(shown))
    rows = -(-len(shown) // columns)
    figure = Picture(figsize=(8.4, 0.7 + rows * (0.62 + _CELL_IN * n) + 0.5), layout="constrained", facecolor="none")
    moved = sum(stepper.bytes_moved.values())
    figure.suptitle(
        f"{stepper.name}: {stepper.taken} of {stepper.steps} steps, {size(moved)} moved",
        x=0.01,
        ha="left",
        fontsize=11,
        fontweight="bold",
        color=INK,
    )
    grid = figure.subplots(rows, columns, squeeze=False)
    for one in grid.flat:
        _bare(one, n, n + 0.9)
    for axes, number, state in zip(grid.flat, numbers, shown, strict=False):
        axes.set_title(f"step {number}" if number else "start", fontsize=9, color=INK, loc="left", pad=2)
        touched = {(dst, at) for _, dst, first, last, _ in state.moves for at in _chunks(stepper, first, last)}
        for rank, chunks in state.chunks.items():
            _head(axes, rank, f"{rank}")
            for at, chunk in enumerate(chunks):
                who = tuple(sorted(state.who[rank][at])) if state.who else (rank,)
                words = (
                    _number(chunk[0]) + (".." if len(chunk) > 1 or stepper.elements > 4096 else "")
                    if len(chunk)
                    else ""
                )
                _cell(axes, rank, 0.9 + at, words, who, is_new=(rank, at) in touched)
    busiest = stepper.busiest_link
    note = (stepper.states[-1].rule or stepper.rule) + (
        f"\nbusiest link {busiest[0][0]} -> {busiest[0][1]}: {size(busiest[1])}; through the ranks: "
        + ", ".join(f"{rank}: {size(of)}" for rank, of in plans.through_ranks(stepper.bytes_moved).items())
        if busiest
        else ""
    )
    figure.supxlabel(note, fontsize=9, color=INK, ha="left", x=0.01)
    return figure


def messages(scene: Scene) -> Picture:
    """A row for each rank, time to the right."""
    has_strip = scene.changed is not None
    ranks = sorted({event.rank for event in scene.events}) or [0]
    n = len(ranks)
    row = {rank: at for at, rank in enumerate(ranks)}
    figure, (axes, *more) = picture(
        f"{scene.story.title}: {'; '.join(scene.said[:2]) or 'nobody waited'}",
        0.95 + 0.52 * n + 0.7 * has_strip,
        [n, 0.7] if has_strip else [1.0],
    )
    end = max((event.end_ms for event in scene.events), default=1.0)
    axes.set(xlim=(-0.01 * end, end * 1.03), ylim=(n - 0.4, -0.6), yticks=range(n))
    axes.set_yticklabels([f"rank {rank}" for rank in ranks])
    axes.set_xlabel("ms", color=INK, fontsize=9)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(False, axis="y")
    for event in scene.events:
        width = max(event.end_ms - event.start_ms, end / 300)
        if event.what == "work":
            axes.add_patch(_bar(event.start_ms, row[event.rank] - 0.36, width, 0.22, LINES[2], "////"))
            continue
        y, colour = row[event.rank] - 0.1, LINES[event.rank % len(LINES)]
        axes.add_patch(_bar(event.start_ms, y, width, 0.22, colour, alpha=0.35, edge=colour))
        if event.blocked_ms > end / 300:
            axes.add_patch(_bar(event.end_ms - event.blocked_ms, y, event.blocked_ms, 0.22, "none", edge=INK))
        label = event.what + ("" if event.is_over else " (never comes back)")
        axes.text(event.start_ms, row[event.rank] + 0.29, label, fontsize=8, color=INK, va="center")
    for sent, received in scene.arrows:
        one, other = scene.events[sent], scene.events[received]
        if one.is_over and other.is_over:
            axes.add_patch(
                FancyArrowPatch(
                    (max(one.start_ms, other.start_ms), row[one.rank] + 0.01),
                    (other.end_ms, row[other.rank] + 0.01),
                    arrowstyle="-|>",
                    mutation_scale=9,
                    color=LINES[one.rank % len(LINES)],
                    lw=1.2,
                    zorder=4,
                )
            )
    if has_strip:
        _strip(more[0], scene.values[1])
    return figure


def costs(found: Costs) -> Picture:
    """Times over sizes with the model drawn through them, and the bytes through each rank."""
    largest = found.sizes[-1]
    fastest = min(found.algorithms, key=lambda name: found.times[name, largest])
    figure, (above, below) = picture(
        f"{size(largest)} on {found.world_size} ranks: {_named(fastest, found)} is the fastest, "
        f"{found.times[fastest, largest] * 1e3:.1f} ms",
        6.2,
        [1.7, 1],
    )
    sizes = found.sizes
    marks = "osD^vPX"
    for at, name in enumerate(found.algorithms):
        colour = INK if name == "all_reduce" else LINES[at % len(LINES)]
        times = found.of(name)
        above.plot(list(times), [t * 1e3 for t in times.values()], marks[at % 7], color=colour, ms=5)
        line = [sizes[0] * (sizes[-1] / sizes[0]) ** (step / 60) for step in range(61)] if len(sizes) > 1 else sizes
        above.plot(line, [found.fit[name].seconds(one) * 1e3 for one in line], color=colour, lw=1.3)
        one = found.fit[name]
        above.plot(
            [],
            [],
            marks[at % 7] + "-",
            color=colour,
            lw=1.3,
            label=f"{_named(name, found)}: {one.messages} x {one.alpha_s * 1e6:.0f} us + "
            f"{one.bytes_factor:g} n / {1e-9 / one.beta_s_per_byte if one.beta_s_per_byte else float('inf'):.1f} GB/s",
        )
    above.set(xscale="log", yscale="log", ylabel="ms")
    above.yaxis.label.set_color(INK)
    above.xaxis.set_major_formatter(FuncFormatter(lambda x, _: size(x)))
    for axis_format in (above.yaxis.set_major_formatter, above.yaxis.set_minor_formatter):
        axis_format(FuncFormatter(lambda y, _: f"{y:g}" if f"{y:.0e}"[0] in "125" else ""))
    above.grid(True, color=FAINT, lw=0.6)
    legend = above.legend(
        fontsize=8, frameon=False, labelcolor=INK, title="points: measured; lines: m alpha + n beta", title_fontsize=8
    )
    legend.get_title().set_color(INK)
    names = [name for name in ("parameter server", "ring all_reduce", "tree all_reduce") if name in found.through]
    for at, name in enumerate(names):
        height = 0.8 / max(len(names), 1)
        colour = LINES[found.algorithms.index(name) % len(LINES)]
        places = [rank - 0.4 + (at + 0.5) * height for rank in found.through[name]]
        bars = below.barh(places, list(found.through[name].values()), height * 0.9, color=colour, label=name)
        below.bar_label(bars, [size(x) for x in found.through[name].values()], fontsize=7, color=INK, padding=2)
    below.set(yticks=range(found.world_size), ylim=(found.world_size - 0.45, -0.55))
    below.set_yticklabels([f"rank {rank}" for rank in range(found.world_size)])
    below.xaxis.set_major_formatter(FuncFormatter(lambda x, _: size(x)))
    below.set_xlabel(f"bytes into and out of each rank for {size(found.counted)} of data, as recorded", fontsize=9)
    below.xaxis.label.set_color(INK)
    below.margins(x=0.12)
    if names:
        below.legend(fontsize=8, frameon=False, labelcolor=INK, loc="lower right")
    return figure


def costs_html(found: Costs) -> str:
    """A table of times, and the model's numbers."""
    head = "".join(f"<th>{size(nbytes)}</th>" for nbytes in found.sizes)
    rows = "".join(
        f"<tr><th style='text-align:left'>{html.escape(_named(name, found))}</th>"
        + "".join(f"<td>{found.times[name, nbytes] * 1e3:.2f}</td>" for nbytes in found.sizes)
        + f"<td>{found.fit[name].alpha_s * 1e6:.0f}</td><td>{found.fit[name].beta_s_per_byte * 1e9:.2f}</td></tr>"
        for name in found.algorithms
    )
    return (
        f"<table><caption>milliseconds on {found.world_size} ranks ({html.escape(found.backend)})</caption>"
        f"<tr><td></td>{head}<th>alpha, us</th><th>beta, ns/B</th></tr>{rows}</table>"
    )


# ---- parts


def _bare(axes: Axes, columns: int, height: float) -> None:
    axes.set(xlim=(-0.02, columns), ylim=(height, 0), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    axes.set_facecolor("none")


def _head(axes: Axes, rank: int, words: str) -> None:
    axes.text(rank + _WIDE / 2, 0.45, words, ha="center", va="center", fontsize=9, color=INK, fontweight="bold")


def _cell(
    axes: Axes, rank: int, y: float, value: Any, who: Sequence[int], mark: bool | None = None, is_new: bool = False
) -> None:
    """A number on the colours of the ranks whose data it is."""
    width = _WIDE / max(len(who), 1)
    for at, one in enumerate(who):  # a strip: the number itself stands on the page's own ground
        axes.add_patch(Rectangle((rank + at * width, y + 0.74), width, 0.18, facecolor=LINES[one % len(LINES)], lw=0))
    edge = INK if mark is None else _RIGHT if mark else _WRONG
    thick = 2.0 if mark is not None else 1.8 if is_new else 0.5
    axes.add_patch(Rectangle((rank, y), _WIDE, 0.92, facecolor="none", edgecolor=edge, lw=thick))
    sign = "" if mark is None else "  right" if mark else "  wrong"
    words = value if isinstance(value, str) else _number(value)
    weight = "bold" if is_new else "normal"
    place = (rank + _WIDE / 2, y + 0.38)
    axes.text(*place, f"{words}{sign}", ha="center", va="center", fontsize=8.5, color=INK, fontweight=weight)
    if len(who) > 1:
        axes.text(rank + _WIDE - 0.02, y + 0.7, format_ranks(who), ha="right", va="bottom", fontsize=5.5, color=INK)


def _chunks(stepper: Stepper, first: int, last: int) -> Iterable[int]:
    return (at for at, (begin, end) in enumerate(stepper._bounds) if begin < last and first < end)


def _bar(
    x: float, y: float, width: float, height: float, face: str, hatch: str = "", alpha: float = 1.0, edge: str = "none"
) -> Rectangle:
    if hatch:
        return Rectangle((x, y), width, height, facecolor=to_rgba(face, 0.25), edgecolor=face, hatch=hatch, lw=0.6)
    if face == "none":  # nothing happens there
        return Rectangle((x, y), width, height, facecolor="none", edgecolor=edge, ls="--", lw=1.0, zorder=3)
    colour = to_rgba(face, alpha)
    return Rectangle((x, y), width, height, facecolor=colour, edgecolor=edge, lw=0.8, zorder=2)


def _strip(axes: Axes, values: Sequence[float]) -> None:
    """What the receiver has, from the first element to the last."""
    for at, value in enumerate(values):
        as_sent = value == 1
        axes.add_patch(
            Rectangle((at, 0), 1.05, 1, facecolor=LINES[0] if as_sent else LINES[1], lw=0, alpha=0.7 if as_sent else 1)
        )
    axes.set(xlim=(0, len(values)), ylim=(0, 1), yticks=[], xticks=[])
    axes.spines[:].set_visible(False)
    changed = sum(value != 1 for value in values) / len(values)
    axes.set_xlabel(
        f"what rank 1 has received, first element to last: blue as it was at isend, orange changed ({changed:.0%})",
        fontsize=8,
        color=INK,
    )


def _named(name: str, found: Costs) -> str:
    return f"{found.backend}'s own all_reduce" if name == "all_reduce" else name


def _number(value: Any) -> str:
    number = float(value)
    return f"{number:.0f}" if number == round(number) and abs(number) < 1e7 else f"{number:.4g}"
