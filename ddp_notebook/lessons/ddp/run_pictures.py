"""Pictures of runs: the buckets, and a timeline of a step.

Colours have the same meaning as in pictures of a recording and in the monitor (`ddp_notebook.display.fill_style`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.patches import Rectangle

from ddp_notebook.display import INK, LINES, ON_LINES, Picture, fill_style, key, picture, text_on
from ddp_notebook.lessons.ddp.times import pieces
from ddp_notebook.records.units import size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ddp_notebook.lessons.ddp.runs import Run
    from ddp_notebook.observe.views import BucketLayout, Step

_LABEL = 8.5  # points
_MOST_RANKS, _MOST_BUCKETS = 8, 8
_THIN = 0.4  # height of a bucket's lane, relative to that of a rank


# ---- buckets


def layout(first: Sequence[BucketLayout], then: Sequence[BucketLayout]) -> Picture:
    """Draw the parameters of each bucket, with widths in proportion to their bytes: in the first step, and from the
    second on."""
    title = f"{len(first)} bucket{'s' * (len(first) != 1)} in the first step, {len(then)} from the second on"
    rows = [("first step", at, one) for at, one in enumerate(first)]
    rows += [("from the second step on", at, one) for at, one in enumerate(then)]
    figure, (axes,) = picture(title, 1.0 + 0.34 * (len(rows) + 2))
    widest = max((one.nbytes for _, _, one in rows), default=1)
    y, labels, before = 0.0, [], ""
    for when, at, one in rows:
        if when != before:
            axes.text(0, y, f"{when}, in the order of sending", color=INK, fontsize=9, fontweight="bold", va="center")
            y, before = y + 1, when
        names = ", ".join(one.parameters) or "?"
        axes.barh(y, one.nbytes / 1e6, height=0.72, color=LINES[at % len(LINES)], alpha=0.75)
        fits = one.nbytes > 0.55 * widest
        axes.text(
            (0.008 * widest + (0 if fits else one.nbytes)) / 1e6,
            y,
            names,
            color=ON_LINES if fits else INK,
            fontsize=_LABEL - 0.5,
            va="center",
            clip_on=True,
        )
        labels.append((y, f"bucket {at}, {size(one.nbytes)}"))
        y += 1
    axes.set_yticks([place for place, _ in labels], [words for _, words in labels])
    axes.set_ylim(y - 0.4, -0.7)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("MB")
    return figure


# ---- time


def run(found: Run) -> Picture:
    """Draw the typical step on all ranks: the computation, and below it the transfers of the buckets."""
    steps = sorted((one for one in found.steps if one.step == found.typical), key=lambda one: one.rank)
    more = f"; ranks 0-{_MOST_RANKS - 1} of {len(steps)}" if len(steps) > _MOST_RANKS else ""
    steps = steps[:_MOST_RANKS]
    zero = min(one.start_ns for one in steps)
    title = f"{found.name}:\na step takes {found.ms['step']:.0f} ms, {_parts_told(found.ms)}"
    figure, (axes,) = picture(title, 1.3 + sum(_height(one) + 0.13 for one in steps))
    y, ticks = 0.0, []
    for step in steps:
        ticks.append((y, f"rank {step.rank}"))
        y = _draw_step(axes, y, found, step, zero) + 0.35
    _finish(figure, axes, ticks, y, f"time since the step began on the first rank (ms){more}")
    return figure


def compare(runs: Sequence[Run]) -> Picture:
    """Draw a typical step of each run on rank 0."""
    steps = [next(one for one in found.steps if (one.rank, one.step) == (0, found.typical)) for found in runs]
    fastest, *_, slowest = sorted([*runs, *runs], key=lambda found: found.ms["step"])
    title = f"A step takes {fastest.ms['step']:.0f} ms with {fastest.name}"
    if slowest is not fastest:
        title += f", {slowest.ms['step']:.0f} ms with {slowest.name}"
    figure, (axes,) = picture(title, 1.45 + sum(_height(one) + 0.34 for one in steps))
    y = 0.0
    for found, step in zip(runs, steps, strict=True):
        axes.text(0, y - 0.15, found.name, color=INK, fontsize=9, fontweight="bold", va="center")
        told = f"{size(found.sent_bytes)} sent; {_parts_told(found.ms)}"
        side = axes.get_yaxis_transform()
        axes.text(1, y + 0.1, told, color=INK, fontsize=_LABEL, va="center", ha="right", transform=side)
        y = _draw_step(axes, y + 0.95, found, step, step.start_ns) + 0.7
    _finish(figure, axes, [], y, "time since the step began on rank 0 (ms)")
    return figure


def _parts_told(of: Mapping[str, float]) -> str:
    told = f"{of['exposed']:.0f} ms of communication exposed"
    return told + (f", {of['waiting']:.0f} ms of waiting" if of["waiting"] > 0.05 * of["step"] else "")


def _height(step: Step) -> float:
    return 0.3 + 0.16 * min(len(step.buckets), _MOST_BUCKETS)


def _draw_step(axes: Axes, y: float, found: Run, step: Step, zero: int) -> float:
    """Draw the work of a rank in one lane and its buckets in thin lanes below. Return the end of the last lane."""
    lanes = {one.bucket: number for number, one in enumerate(step.buckets[:_MOST_BUCKETS])}
    ends: dict[int, int] = {}
    begin = step.end_ns
    for piece in pieces(found.spans, found.steps, step):
        left, width = (piece.start_ns - zero) / 1e6, (piece.end_ns - piece.start_ns) / 1e6
        if piece.bucket is None:
            axes.barh(y, width, left=left, height=0.72, **fill_style(piece.meaning))
            begin = min(begin, piece.start_ns)
            style: dict[str, Any] = {"color": text_on(piece.meaning), "fontsize": 8, "ha": "center", "va": "center"}
            # `_finish` hides texts that do not fit, when the limits of the axis are known.
            axes.text(left + width / 2, y, piece.words, gid=str(width), **style)
        elif piece.bucket in lanes:
            lane = y + 0.62 + _THIN * lanes[piece.bucket]
            axes.barh(lane, width, left=left, height=0.8 * _THIN, **fill_style(piece.meaning))
            ends[piece.bucket] = max(ends.get(piece.bucket, 0), piece.end_ns)
    for bucket, end in ends.items():
        axes.text(
            (end - zero) / 1e6, y + 0.62 + _THIN * lanes[bucket], f" {bucket}", color=INK, fontsize=7, va="center"
        )
    if step.rank == found.options.straggler:
        middle, width = (begin + step.start_ns - 2 * zero) / 2e6, (begin - step.start_ns) / 1e6
        axes.text(middle, y, "asleep", gid=str(width), color=INK, fontsize=8, ha="center", va="center")
    return y + 0.62 + _THIN * len(lanes)


def _finish(figure: Picture, axes: Axes, ticks: Sequence[tuple[float, str]], bottom: float, words: str) -> None:
    axes.set_yticks([place for place, _ in ticks], [word for _, word in ticks])
    axes.set_ylim(bottom - 0.3, -0.55)
    right = max((one.get_x() + one.get_width() for one in axes.patches if isinstance(one, Rectangle)), default=1.0)
    axes.set_xlim(0, 1.03 * right)
    for text in axes.texts:
        if (width := text.get_gid()) is not None and float(width) < 0.012 * len(text.get_text()) * right:
            text.set_visible(False)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(f"{words}; thin bars: buckets, by number")
    key(figure, ("forward", "backward", "optimizer", "hidden", "exposed", "waiting"))
