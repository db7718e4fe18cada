"""One redraw of the monitor as HTML, at most 20 kB."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from ddp_notebook.observe.tables.recorded import RecordedTables
from ddp_notebook.widgets.feed.feed import Feed
from ddp_notebook.widgets.html import metric_curves, step_bars
from ddp_notebook.widgets.html.markup import Markup, element, join, shorten
from ddp_notebook.widgets.html.rank_table import MOST_ROWS, table
from ddp_notebook.widgets.html.sources import PageState, Sources
from ddp_notebook.widgets.live_status import LiveStatus

MOST_BYTES = 20_000
# Rows of the table and bars of steps, from the largest to the smallest page. Long texts and lines need space.
_PARTS = ((MOST_ROWS, step_bars.MOST_BARS), (MOST_ROWS, 24), (6, 24), (2, 12))
_WHY = 300  # most characters of the reason
_TELLS = {"stuck": "hangs"}


def draw(shown: PageState, key: str) -> str:
    """Return the page.

    Args:
        shown: State to show.
        key: Id that is unique in the notebook.
    """
    name, *_ = [*shown.courses, ""]
    lines = []
    if name:
        others = {other: course for other, course in shown.courses.items() if other != name}
        lines.append(metric_curves.chart(name, shown.courses[name], others))
    above = join(_style(), _head(shown), _alarm(shown))
    for most_rows, most_bars in _PARTS:
        steps = [step_bars.chart(shown.steps, f"ddp-{key}", most_bars, shown.run)] if len(shown.steps) else []
        charts = element("div", *lines, *steps, class_="charts")
        ranks = element("div", table(shown.ranks, name, most_rows), class_="ranks")
        parts = (above, charts, ranks, _foot(shown))
        page = element("section", *parts, class_="ddp-html", aria_label="Monitor of the ranks")
        if len(page.encode()) <= MOST_BYTES:
            break
    return page


def of_recording(recording: RecordedTables, cell: int | None, title: str, key: str) -> str:
    """Return the page of a finished recording, which stays in the notebook.

    Args:
        cell: Show only this cell; None for all cells.
        title: Title of the session.
        key: See `draw`.
    """
    feed = Feed(recording, cell, is_live=False)
    present = LiveStatus(feed, None, title)
    ranks = present.look(0.0)
    feed.delta(feed.end_ns, present.head(), ranks)
    return draw(Sources(feed).look(present.head()), key)


@cache
def _style() -> Markup:
    text = Path(__file__).with_name("style.css").read_text(encoding="utf-8")
    lines = (line.strip() for line in text.partition("*/")[2].splitlines())
    return Markup(f"<style>{''.join(lines)}</style>")


def _head(shown: PageState) -> Markup:
    word = _TELLS.get(shown.state, shown.state)
    cell = f" {shown.cell}" if shown.cell and shown.state != "stopped" else ""
    what = {"running": "is running", "stuck": "does not go on", "idle": "was the last" if cell else ""}.get(
        shown.state, ""
    )
    chip = element("span", word, class_=f"chip {shown.state}")
    return element(
        "div",
        element("b", shown.title),
        " ",
        chip,
        element("span", f"{cell} {what}".rstrip(), class_="soft"),
        class_="head",
    )


def _alarm(shown: PageState) -> Markup | None:
    if shown.state != "stuck":
        return None
    why = shown.why or "the ranks wait for each other"
    return element(
        "div",
        element("b", "No progress: ", shorten(why, _WHY)),
        element("div", "The stop button ends the cell; every variable is kept.", class_="soft"),
        class_="alarm",
    )


def _foot(shown: PageState) -> Markup | None:
    nothing = [] if shown.courses or len(shown.steps) else ["nothing was logged, and no step has ended"]
    notes = [*nothing, *shown.notes]
    return element("div", " · ".join(notes), class_="soft") if notes else None
