"""Chart of the last steps: a bar for each, which shows how its time was spent (mean of the ranks)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ddp_notebook.observe.figures.palette import FILLS, STEP_PARTS
from ddp_notebook.records.schema import Rows
from ddp_notebook.records.units import percent
from ddp_notebook.widgets.html.axes import HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axes
from ddp_notebook.widgets.html.markup import Markup, boxes, element

MOST_BARS = 48
_MOST_LABELS = 8  # labels below the bars
_FAINT = "0.15"
_TOLD = 0.005  # smallest share of a step that is named
_HEADROOM = 1.13  # height of the axis relative to its cut-off bars
_OVER = 1.5  # a bar is cut off above this multiple of the 90th percentile

Numbers = npt.NDArray[np.float64]


def chart(rows: Rows, pattern: str, most: int = MOST_BARS, run: Mapping[str, Any] | None = None) -> Markup:
    """Return the chart of the last steps.

    Args:
        rows: Rows of the feed's table `step` of one cell, at least one.
        pattern: Id of the hatch, unique on the page.
        most: Limit for the number of bars.
        run: Numbers of the whole training run, see `LiveStatus.head`; None if they are not known.
    """
    numbers, parts = means(rows)
    numbers, parts = numbers[-most:], parts[-most:]
    whole = parts.sum(axis=1)
    shares = parts.sum(axis=0) / max(whole.sum(), 1e-9)
    told = [at for at in range(len(STEP_PARTS)) if shares[at] >= _TOLD]
    shown = ", ".join(f"{percent(shares[at])} {FILLS[STEP_PARTS[at]].words}" for at in told)
    steps = f"the last {len(numbers)} step{'s' * (len(numbers) != 1)}"
    drawn = element(
        "svg",
        element("title", f"what {steps} took: {shown}"),
        element("defs", _hatch(pattern)),
        *_draw(numbers, parts, pattern),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
    )
    key = [
        element("li", f"{steps}:"),  # the caption describes the whole run
        *(
            element("li", _swatch(part), FILLS[part].words, " ", element("b", percent(shares[at])))
            for at, part in enumerate(STEP_PARTS)
            if at in told
        ),
    ]
    words = [] if run is None else [f"{run['label']}: ", element("b", run["per_step"]), f" {run['definition']}"]
    caption = element("figcaption", *words)
    return element("figure", caption, drawn, element("ul", *key))


def means(rows: Rows) -> tuple[npt.NDArray[np.int64], Numbers]:
    """Return (n,) numbers of steps, ascending, and (n, parts) milliseconds.

    The milliseconds are means over the ranks that have finished the step.
    """
    numbers, of, counts = np.unique(rows["step"], return_inverse=True, return_counts=True)
    sums = np.zeros((len(numbers), len(STEP_PARTS)))
    hidden = np.minimum(rows["overlapped"], rows["compute"])
    for at, part in enumerate(STEP_PARTS):
        column = {"compute": rows["compute"] - hidden, "overlapped": hidden}.get(part)
        np.add.at(sums[:, at], of, rows[part] if column is None else column)
    return numbers.astype(np.int64), sums / counts[:, None]


def _draw(numbers: npt.NDArray[np.int64], parts: Numbers, pattern: str) -> list[Markup]:
    whole = parts.sum(axis=1)
    top = 1.1 * float(whole.max())
    usual = 1.15 * float(np.percentile(whole, 90))
    is_cut = top > _OVER * usual  # the first step is often much longer than all others and would hide them
    # Bars are adjacent. Their labels are the numbers of the measured steps, which may have gaps. Above cut-off bars
    # there is space for the length of the longest one.
    axes = Axes(x=(-0.5, len(numbers) - 0.5), y=(0.0, (_HEADROOM * usual if is_cut else top) or 1.0))
    most = usual if is_cut else np.inf
    width = (RIGHT - LEFT) / len(numbers)
    left = [round(LEFT + width * at) + 1 for at in range(len(numbers))]
    right = [max(begin + 1, round(LEFT + width * (at + 1)) - 1) for at, begin in enumerate(left)]
    every = -(-len(numbers) // _MOST_LABELS)
    labels = [(float(at), str(numbers[at])) for at in range(0, len(numbers), every)]
    drawn = [axes.frame("step", labels, "ms")]
    base = np.zeros(len(numbers))
    for at, part in enumerate(STEP_PARTS):
        found = []
        for bar, (low, length) in enumerate(zip(base.tolist(), parts[:, at].tolist(), strict=True)):
            upper, lower = axes.at_y(min(low + length, most)), axes.at_y(min(low, most))
            if lower > upper:
                found.append((left[bar], upper, right[bar] - left[bar], lower - upper))
        base += parts[:, at]
        if found:
            drawn.append(element("path", d=boxes(found), **_paint(part, pattern)))
    if is_cut:
        at = int(whole.argmax())
        is_left = at < len(numbers) / 2
        words = f"{whole[at]:,.0f} ms"
        place = {"x": left[at] if is_left else right[at], "text_anchor": "start" if is_left else "end"}
        drawn.append(element("text", f"↑ {words}" if is_left else f"{words} ↑", y=TOP + 18, **place))
    return drawn


def _paint(part: str, pattern: str) -> dict[str, str]:
    """Return the fill of an area. Waiting gets only an outline, because the rank does nothing."""
    if part == "overlapped":
        return {"fill": f"url(#{pattern})"}
    if part == "waiting":
        return {"fill": FILLS[part].edge, "fill_opacity": _FAINT, "stroke": FILLS[part].edge}
    return {"fill": FILLS[part].face}


def _swatch(part: str) -> Markup:
    fill = FILLS[part]
    style = f"background:{fill.face}"
    if part == "overlapped":
        style = f"background:repeating-linear-gradient(135deg,{fill.face} 0 3px,{fill.edge} 3px 5px)"
    elif part == "waiting":
        style = f"box-shadow:inset 0 0 0 1px {fill.edge}"
    return element("i", style=style)


def _hatch(pattern: str) -> Markup:
    """Return the hatch for compute that overlaps communication."""
    fill = FILLS["overlapped"]
    stripe = element("path", d="M-2 2l4-4M0 12l12-12M10 14l4-4", stroke=fill.edge, style="stroke-width:3")
    ground = element("path", d="M0 0h12v12h-12z", fill=fill.face)
    return element("pattern", ground, stripe, id=pattern, width=12, height=12, patternUnits="userSpaceOnUse")
