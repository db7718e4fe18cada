"""Calls between ranks as a sequence diagram: a column per rank, time downwards, an arrow per call.

| on screen | meaning |
|---|---|
| arrow | a call, from the caller to the callee; in the colour of the enclosing call; its name stands at the left |
| upright bar | execution; bars side by side run at the same time |
| dashed arrow | the answer |
| dotted arrow | gradients in a backward pass, against the direction of the call |
| box below | a value that a rank owns; circles: ranks with a reference to it, arrows: the rank that passed it on |
| dashed box, circle or arrow below | released since |

A line is a moment at which something happened, not a length of time: calls take microseconds and milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from ddp_notebook.observe.figures.drawing import FAINT, Picture, picture
from ddp_notebook.observe.figures.moments import MOST_CALLS, drawn_references
from ddp_notebook.observe.figures.palette import INK, LINES

if TYPE_CHECKING:
    from ddp_notebook.observe.remote import AutogradContext, Reference, RemoteCall

_LINE_IN = 0.19  # height of a moment
_ROW_IN = 0.36  # height of a reference
_TALLEST_IN = 8.0  # a figure shows fewer calls rather than be higher than a screen
_BAR = 0.035  # width of an execution bar, in columns
_STEP = 0.05  # distance between bars side by side
_TIMES_IN = 0.65  # width of the column with the times
_NAMES_IN = 1.75  # width of the column with the names of calls, which no arrow crosses
_WIDTH_IN = 8.2  # of the axes
_BEFORE, _AFTER = 0.3, 0.4  # room before the first and after the last rank, in columns
_LETTER_IN = 4.9 / 72  # width of a letter in the box of a reference
_LONGEST = 26  # letters of a name that fit into its column
_REFERENCE = "#217FBF"  # contrast 4.3:1 on white and on #111, because lines are thin
_TO_HERE = "to_here"


class _Moment(NamedTuple):
    time_ns: int
    order: int  # order of moments at the same time
    what: str
    at: int  # index of its call or pair


def draw(
    calls: Sequence[RemoteCall],
    references: Sequence[Reference] = (),
    contexts: Sequence[AutogradContext] = (),
    most: int = MOST_CALLS,
) -> Picture:
    """Draw the figure.

    Args:
        calls: in the order in which they were made; not empty.
        references: references to draw below.
        contexts: distributed autograd contexts, whose pairs of send and recv are drawn.
        most: largest number of calls to draw, the first ones.
    """
    references = drawn_references(references)
    lines = (_TALLEST_IN - 0.8) / _LINE_IN - 1 - (len(references) * _ROW_IN / _LINE_IN + 1 if references else 0)
    while most > 1 and len(_moments(calls[:most], [])) > lines:
        most -= 1
    shown, left_out = list(calls[:most]), len(calls) - most
    pairs = [pair for context in contexts for pair in context.pairs if pair.backward_ns is not None] * (left_out <= 0)
    moments = _moments(shown, pairs)
    ranks = sorted({rank for call in calls for rank in (call.src, call.dst)} | {one.owner for one in references})
    height = len(moments) + 1 + (len(references) * _ROW_IN / _LINE_IN + 1 if references else 0)
    figure, (axes,) = picture(_title(calls, left_out), 0.8 + height * _LINE_IN)
    drawing = _Drawing(axes, {rank: at for at, rank in enumerate(ranks)}, shown, moments)
    drawing.columns(height)
    drawing.calls_of()
    drawing.pairs_of(pairs)
    drawing.references_of(references, len(moments) + 1)
    return figure


def _moments(calls: Sequence[RemoteCall], pairs: Sequence[Any]) -> list[_Moment]:
    found = [
        _Moment(time_ns, order, what, at)
        for at, call in enumerate(calls)
        for order, (what, time_ns) in enumerate(
            [("sent", call.sent_ns), ("begun", call.begun_ns), ("ended", call.ended_ns), ("returned", call.returned_ns)]
        )
        if time_ns is not None
    ]
    found += [
        _Moment(call.done_ns, 2, "done", at)
        for at, call in enumerate(calls)
        if call.done_ns is not None and call.ended_ns is not None and call.done_ns > call.ended_ns
    ]
    found += [_Moment(pair.backward_ns, 4, "backward", at) for at, pair in enumerate(pairs)]
    return sorted(found)


def _title(calls: Sequence[RemoteCall], left_out: int) -> str:
    ran: dict[int, int] = {}
    for call in calls:
        ran[call.dst] = ran.get(call.dst, 0) + 1
    busiest = max(ran, key=lambda rank: ran[rank])
    words = f"{len(calls)} call{'s' * (len(calls) != 1)}, {ran[busiest]} of them to rank {busiest}"
    return f"{words}; the first {len(calls) - left_out}" if left_out > 0 else words


@dataclass
class _Drawing:
    """Draws the parts of a sequence diagram.

    Args:
        column: position of each rank.
        moments: the lines of the figure, in order of time.
    """

    axes: Axes
    column: Mapping[int, int]
    calls: Sequence[RemoteCall]
    moments: Sequence[_Moment]
    row: dict[tuple[int, str], int] = field(init=False)
    lane: list[int] = field(init=False)
    own: list[str | None] = field(init=False)  # colours of calls that made other calls
    column_in: float = field(init=False)  # distance between two ranks, in inches

    def __post_init__(self) -> None:
        self.column_in = (_WIDTH_IN - _TIMES_IN - _NAMES_IN) / (len(self.column) - 1 + _BEFORE + _AFTER)
        self.row = {(moment.at, moment.what): row for row, moment in enumerate(self.moments)}
        places = {call.id: at for at, call in enumerate(self.calls)}
        self.parents = [None if call.parent is None else places.get(call.parent) for call in self.calls]
        makers = sorted({parent for parent in self.parents if parent is not None})
        self.own = [LINES[makers.index(at) % len(LINES)] if at in makers else None for at in range(len(self.calls))]
        self.lane = self._lanes()

    def _lanes(self) -> list[int]:
        ends: dict[int, list[float]] = {}
        found = [0] * len(self.calls)
        for at in sorted(range(len(self.calls)), key=lambda at: self.row.get((at, "begun"), 0)):
            begun = self.row.get((at, "begun"))
            if begun is None:
                continue
            mine = ends.setdefault(self.calls[at].dst, [])
            lane = next((lane for lane, end in enumerate(mine) if end < begun), len(mine))
            mine[lane : lane + 1] = [self.row.get((at, "ended"), float("inf"))]
            found[at] = lane
        return found

    def _colour(self, at: int | None) -> str:
        return (self.own[at] if at is not None else None) or INK

    def columns(self, height: float) -> None:
        """Draw a vertical line for each rank, and the times."""
        axes, n = self.axes, len(self.column)
        left = -_BEFORE - (_TIMES_IN + _NAMES_IN) / self.column_in
        axes.set(xlim=(left, n - 1 + _AFTER), ylim=(height, -1.4), xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
        axes.grid(False)
        for rank, x in self.column.items():
            axes.plot([x, x], [-0.4, len(self.moments)], color=FAINT, lw=1, ls=(0, (2, 3)), zorder=0)
            axes.text(x, -0.9, f"rank {rank}", ha="center", va="center", fontsize=9, fontweight="bold", color=INK)
        first = self.moments[0].time_ns
        before = ""
        for row, moment in enumerate(self.moments):
            ms = (moment.time_ns - first) / 1e6
            words = f"{ms:.1f} ms" if ms < 9.95 else f"{ms:.0f} ms"
            if words != before:
                axes.text(left, row, words, fontsize=7.5, va="center", color=INK)
            before = words

    def _name(self, row: int, name: str) -> None:
        """Write a name into the column between the times and the ranks."""
        words = name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}\N{HORIZONTAL ELLIPSIS}"
        x = -_BEFORE - _NAMES_IN / self.column_in
        self.axes.text(x, row, words, va="center", fontsize=7.5, family="monospace", color=INK)

    def calls_of(self) -> None:
        """Draw bars, arrows, answers and names."""
        last = len(self.moments) - 1
        for at, call in enumerate(self.calls):
            begun, ended = self.row.get((at, "begun")), self.row.get((at, "ended"), last)
            if begun is not None:
                colour, alpha = (self.own[at], 0.75) if self.own[at] else (self._colour(self.parents[at]), 0.3)
                x = self.column[call.dst] + self.lane[at] * _STEP - _BAR / 2
                edge = "#D55E00" if call.error else colour
                bar = Rectangle((x, begun - 0.2), _BAR, ended - begun + 0.4, facecolor=colour, alpha=alpha, zorder=2)
                self.axes.add_patch(bar)
                outline = Rectangle(bar.get_xy(), _BAR, bar.get_height(), facecolor="none", edgecolor=edge, lw=0.9)
                self.axes.add_patch(outline)
            self._arrows(at, call)

    def _arrows(self, at: int, call: RemoteCall) -> None:
        parent = self.parents[at]
        colour = self._colour(parent)
        x1 = self.column[call.src] + (self.lane[parent] * _STEP if parent is not None else 0)
        x2 = self.column[call.dst] + self.lane[at] * _STEP
        sent, returned = self.row[at, "sent"], self.row.get((at, "returned"))
        begun, ended = self.row.get((at, "begun"), sent), self.row.get((at, "ended"))
        self._arrow((x1, sent), (x2, begun), colour, "-")
        if returned is not None:
            left = self.row.get((at, "done"), ended)
            if left is None or left > returned:
                left = self.row.get((at, "begun"), returned)
            self._arrow((x2, left), (x1, returned), colour, (0, (4, 2)))
        name = _TO_HERE if call.kind == _TO_HERE else call.function.rpartition(".")[2]
        self._name(sent, f"remote {name}" if call.kind == "remote" else name)

    def _arrow(self, start: tuple[float, float], end: tuple[float, float], colour: str, dashes: Any) -> None:
        (x1, y1), (x2, y2) = start, end
        aside = "arc3"
        if x1 == x2:  # a call to the same rank
            y2, aside = max(y2, y1 + 0.5), "arc3,rad=-0.6" if dashes == "-" else "arc3,rad=0.6"
        gap = 0 if x1 == x2 else (_BAR / 2 + 0.004) * (1 if x2 > x1 else -1)
        self.axes.add_patch(
            FancyArrowPatch(
                (x1 + gap, y1),
                (x2 - gap, y2),
                arrowstyle="-|>",
                mutation_scale=8,
                shrinkA=0,
                shrinkB=0,
                color=colour,
                linestyle=dashes,
                lw=1.2 if dashes == "-" else 0.9,
                connectionstyle=aside,
                zorder=4,
            )
        )

    def pairs_of(self, pairs: Sequence[Any]) -> None:
        """Draw the gradients of a backward pass."""
        for at, pair in enumerate(pairs):
            row = self.row[at, "backward"]
            x1, x2 = self.column[pair.dst], self.column[pair.src]
            self._arrow((x1, row), (x2, row), "#D55E00", (0, (1, 2)))
            self._name(row, "gradient")

    def references_of(self, references: Sequence[Reference], top: float) -> None:
        """Draw the owners of values, and the ranks that have references."""
        if not references:
            return
        self.axes.text(self.axes.get_xlim()[0], top, "references", fontsize=7.5, va="center", color=INK)
        for at, one in enumerate(references):
            y = top + 0.9 + at * _ROW_IN / _LINE_IN
            owner, what = self.column[one.owner], one.what or "a value"
            half = max(0.17, len(what) * _LETTER_IN / 2 / self.column_in + 0.02)  # width of the box
            for user in one.users:
                if user.rank not in self.column or user.rank == one.owner:
                    continue
                x = self.column[user.rank]
                start = self.column.get(one.owner if user.parent is None else user.parent, owner)
                dashes = "-" if user.deleted_ns is None else "--"
                side = 1 if x > start else -1
                if start != x:
                    # curved around columns between the two
                    passes = "arc3" if abs(x - start) == 1 else f"arc3,rad={-side * 0.05}"
                    begin = (start + side * (half + 0.02 if start == owner else 0.05), y)
                    arrow = FancyArrowPatch(begin, (x - side * 0.05, y), arrowstyle="-|>", mutation_scale=8, shrinkA=0,
                                            shrinkB=0, color=_REFERENCE, ls=dashes, lw=1.1,
                                            connectionstyle=passes)  # fmt: skip
                    self.axes.add_patch(arrow)
                self.axes.scatter([x], [y], s=64, facecolors="none", edgecolors=_REFERENCE, linestyles=dashes)
            gone = one.deleted_ns is not None
            box = FancyBboxPatch((owner - half, y - 0.5), 2 * half, 1.0, boxstyle="round,pad=0.01,rounding_size=0.03",
                                 mutation_aspect=8, facecolor="none", edgecolor=_REFERENCE,
                                 ls="--" if gone else "-")  # fmt: skip
            self.axes.add_patch(box)
            self.axes.text(owner, y, what, ha="center", va="center", fontsize=8, family="monospace", color=INK)
