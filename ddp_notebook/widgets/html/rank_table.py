"""Table of the ranks: a row for each, or for many ranks a row for each of the worst and one for all others."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ddp_notebook.records.units import ms, percent, size, three_figures
from ddp_notebook.records.words import format_ranks
from ddp_notebook.widgets.html.markup import Markup, element, shorten
from ddp_notebook.widgets.html.step_bars import MOST_BARS

_MISSING = "\N{EN DASH}"
MOST_ROWS = 12
_WORST = 8  # rows of single ranks if not all fit
_HOST = "Host"  # shown if ranks are on several hosts
_TROUBLE = ("died", "silent", "failed")
_LINE, _WAITS_FOR, _RANKS, _METRIC = 44, 64, 80, 20  # most characters


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow:
    """Known facts about a rank. Unknown values are None or ""."""

    rank: int
    host: str = ""
    state: str = ""
    line: str = ""
    waits_for: str = ""
    metric: float | None = None  # last value of the metric
    step: int | None = None  # last finished step
    step_ms: float | None = None  # mean duration of the last steps
    waiting: float | None = None  # share of the step time spent waiting for slower ranks
    cpu: float | None = None  # load of one core, 0 to 1
    rss: float | None = None  # bytes
    gpu_bytes: float | None = None

    @property
    def own_ms(self) -> float:
        """Return the step time without waiting for other ranks. It is highest on the slowest rank."""
        return (self.step_ms or 0.0) * (1.0 - (self.waiting or 0.0))


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    of: Callable[[RankRow], str]
    # for numeric columns; the row of the others shows the median
    value: Callable[[RankRow], float | None] | None = None
    write: Callable[[float], str] = str


def table(rows: Sequence[RankRow], metric: str, most: int = MOST_ROWS) -> Markup:
    """Return the table.

    Args:
        rows: All ranks, in their order.
        metric: Name of the metric whose last value is shown; "" for none.
        most: Limit for the number of rows.
    """
    is_live = any(row.state for row in rows)  # during a cell, text columns stay visible even if they are empty
    known = [
        column
        for column in _columns(metric)
        if (is_live and column.value is None and column.title != _HOST) or any(map(column.of, rows))
    ]
    own, others = choose(rows, most)
    head = element(
        "tr",
        element("th", "Rank", scope="col"),
        *(element("th", column.title, scope="col", class_=_class(column)) for column in known),
    )
    body = [
        element(
            "tr",
            element("th", str(row.rank), scope="row"),
            *(element("td", column.of(row) or _MISSING, class_=_class(column)) for column in known),
            class_="waits" if row.waits_for else None,
        )
        for row in own
    ]
    if others:
        named = shorten(format_ranks([row.rank for row in others]), _RANKS)
        body.append(
            element(
                "tr",
                element("th", f"{len(others)} others", scope="row", title=named),
                *(element("td", _together(column, others) or _MISSING, class_=_class(column)) for column in known),
                class_="waits" if all(row.waits_for for row in others) else None,
            )
        )
    caption = element("caption", "The ranks" + (f": the {len(own)} that differ most, and the others" if others else ""))
    return element("table", caption, element("thead", head), element("tbody", *body))


def choose(rows: Sequence[RankRow], most: int) -> tuple[list[RankRow], list[RankRow]]:
    """Return the ranks that get their own row, and the others.

    Dead ranks and ranks that do not answer come first. Then come the ranks in the rarest state, such as one that all
    others wait for. Then come the slowest.

    Example:
        >>> rows = [RankRow(rank=rank, state="waiting", waits_for="rank 7 in all_reduce #5") for rank in range(64)]
        >>> rows[7] = RankRow(rank=7, state="running", line="cell line 3")
        >>> own, others = choose(rows, 12)
        >>> 7 in [row.rank for row in own], len(own), len(others)
        (True, 8, 56)
    """
    if len(rows) <= most:
        return list(rows), []
    like = Counter(row.waits_for for row in rows)
    is_held = any(row.waits_for for row in rows)
    order = sorted(
        rows,
        key=lambda row: (row.state not in _TROUBLE, like[row.waits_for] if is_held else 0, -row.own_ms, row.rank),
    )
    count = min(_WORST, most - 1)
    return sorted(order[:count], key=_by_rank), sorted(order[count:], key=_by_rank)


def _by_rank(row: RankRow) -> int:
    return row.rank


def _columns(metric: str) -> list[_Column]:
    return [
        _Column(_HOST, lambda row: row.host),
        _Column("State", lambda row: row.state),
        _Column("Line", lambda row: shorten(row.line, _LINE)),
        _numbers(shorten(metric, _METRIC), lambda row: row.metric, three_figures),
        _numbers("Last step", lambda row: row.step, lambda value: f"{value:.0f}"),
        _numbers(f"Step time, last {MOST_BARS}", lambda row: row.step_ms, lambda value: ms(value * 1e6)),
        _numbers("Waiting", lambda row: row.waiting, percent),
        _numbers("CPU", lambda row: row.cpu, percent),
        _numbers("Memory", lambda row: row.rss, size),
        _numbers("GPU memory", lambda row: row.gpu_bytes, size),
        _Column("Waits for", lambda row: shorten(row.waits_for, _WAITS_FOR)),
    ]


def _numbers(title: str, value: Callable[[RankRow], float | None], write: Callable[[float], str]) -> _Column:
    def of(row: RankRow) -> str:
        found = value(row)
        return "" if found is None else write(found)

    return _Column(title, of, value, write)


def _class(column: _Column) -> str | None:
    return "n" if column.value is not None else None


def _together(column: _Column, rows: Iterable[RankRow]) -> str:
    """Return the summary of several ranks in a column: the median, or the most frequent texts."""
    if column.value is not None:
        found = [value for row in rows if (value := column.value(row)) is not None]
        return column.write(statistics.median(found)) if found else ""
    counts = Counter(words for row in rows if (words := column.of(row))).most_common(2)
    if len(counts) < 2:
        return counts[0][0] if counts else ""
    return shorten(", ".join(f"{count} {words}" for words, count in counts), _LINE)
