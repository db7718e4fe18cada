"""Picture of the sends and receives of a cell, drawn from the recording."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddp_notebook.display import INK
from ddp_notebook.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Patch

    from ddp_notebook import Recording
    from ddp_notebook.display import Picture
    from ddp_notebook.observe.views import Collective

_SHORTEST = 0.004  # shortest bar, as a share of the width, so that it is visible
_COLOURS = {"send": "#D55E00", "recv": "#0072B2"}


def exchanges(recording: Recording | None = None, cell: int | None = None) -> Picture:
    """Draw a timeline for each rank: orange while it sends, blue while it receives, and an arrow for each message.

    A full bar is time in which the rank's program was blocked. An outline is a transfer during which the program did
    something else (`isend`, `irecv`).

    Args:
        recording: Recording to draw; None for that of the running session.
        cell: Number of the cell; None for the last one that sent something.

    Raises:
        UsageError: Nothing was sent.

    Example:
        >>> exchanges(session.recording).savefig("exchanges.png")
    """
    from ddp_notebook.display import picture

    calls = _calls(_running() if recording is None else recording, cell)
    ranks = sorted({call.rank for call in calls} | {rank for call in calls for rank in call.ranks})
    figure, (axes,) = picture("", 0.9 + 0.45 * len(ranks))
    figure.suptitle("")
    start_ns = min(call.issue_ns for call in calls)
    end_ns = max(call.end_ns or call.issue_ns for call in calls)
    timeline = _Timeline(axes=axes, ranks=ranks, start_ns=start_ns, width_ns=end_ns - start_ns or 1)
    for call in calls:
        timeline.draw_call(call)
    for sent, received in _messages(calls):
        timeline.draw_message(sent, received)
    timeline.label_axes()
    figure.legend(
        handles=_legend_keys(has_async=any(call.is_async for call in calls)),
        loc="outside upper left",
        ncols=3,
        frameon=False,
        fontsize=9,
        labelcolor=INK,
    )
    return figure


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timeline:
    """Axes with time from left to right and a row for each rank."""

    axes: Axes
    ranks: Sequence[int]
    start_ns: int
    width_ns: int

    @property
    def unit(self) -> tuple[str, float]:
        """Return the unit of the time axis, and its nanoseconds."""
        return ("s", 1e9) if self.width_ns > 2e9 else ("ms", 1e6)

    def draw_call(self, call: Collective) -> None:
        """Draw a full bar if the call blocks the program, otherwise an outline with a full bar for the time in
        `wait`."""
        end_ns = call.end_ns or self.start_ns + self.width_ns
        self._draw_bar(call, call.issue_ns, end_ns, full=not call.is_async)
        if call.is_async and call.blocked_ns > 0.05 * (end_ns - call.issue_ns):
            self._draw_bar(call, end_ns - min(call.blocked_ns, end_ns - call.issue_ns), end_ns, full=True)

    def _draw_bar(self, call: Collective, start_ns: int, end_ns: int, *, full: bool) -> None:
        from matplotlib.patches import Rectangle

        colour = _COLOURS[call.op]
        length = max(end_ns - start_ns, _SHORTEST * self.width_ns) / self.unit[1]
        offset = 0.16 if call.op == "send" else -0.16
        corner = self._position(start_ns), self.ranks.index(call.rank) - offset - 0.13
        self.axes.add_patch(Rectangle(corner, length, 0.26, fc=colour if full else "none", ec=colour))

    def draw_message(self, sent: Collective, received: Collective) -> None:
        """Draw an arrow from the sender's row to the receiver's, if both calls have ended."""
        if sent.end_ns is None or received.end_ns is None:
            return
        self.axes.annotate(
            "",
            xytext=(self._position(max(received.issue_ns, sent.issue_ns)), self.ranks.index(sent.rank)),
            xy=(self._position(received.end_ns), self.ranks.index(received.rank)),
            arrowprops={"arrowstyle": "->", "color": INK},
        )

    def label_axes(self) -> None:
        """Set the limits, the rank names and the time unit."""
        unit, unit_ns = self.unit
        self.axes.set_xlim(-0.02 * self.width_ns / unit_ns, 1.04 * self.width_ns / unit_ns)
        self.axes.set_ylim(len(self.ranks) - 0.4, -0.6)
        self.axes.set_yticks(range(len(self.ranks)), [f"rank {rank}" for rank in self.ranks])
        self.axes.set_xlabel(unit)

    def _position(self, moment_ns: int) -> float:
        return (moment_ns - self.start_ns) / self.unit[1]


def _legend_keys(*, has_async: bool) -> list[Patch]:
    from matplotlib.patches import Patch

    keys = [Patch(fc=colour, ec=colour, label=f"stands still in {op}") for op, colour in _COLOURS.items()]
    if has_async:
        keys.append(Patch(fc="none", ec=INK, label="under way, the program goes on"))
    return keys


def _running() -> Recording:
    from ddp_notebook.session import current

    session = current()
    if session is None:
        raise UsageError("no ranks are running, so no messages can be drawn; start ranks with %ddp_start 4")
    return session.recording


def _calls(recording: Recording, cell: int | None) -> list[Collective]:
    found = [call for call in recording.collectives(cell=cell) if call.is_point_to_point]
    last = max((call.cell for call in found), default=None)
    if last is None:
        raise UsageError("no message between two ranks was recorded" + (f" in cell {cell}" if cell is not None else ""))
    return [call for call in found if call.cell == last]


def _messages(calls: list[Collective]) -> list[tuple[Collective, Collective]]:
    """Match sends with their receives: the n-th from a rank to another, by tag.

    A receive from any source matches the send that ended closest to it.
    """
    sent = [call for call in sorted(calls, key=lambda call: call.issue_ns) if call.op == "send"]
    pairs = []
    for call in sorted(
        (call for call in calls if call.op == "recv"), key=lambda call: (call.peer is None, call.issue_ns)
    ):
        fitting = [
            one for one in sent if (one.peer, one.tag) == (call.rank, call.tag) and call.peer in (one.rank, None)
        ]
        if call.peer is None:
            fitting.sort(key=lambda one: abs((one.end_ns or 0) - (call.end_ns or 0)))
        if fitting:
            pairs.append((fitting[0], call))
            sent.remove(fitting[0])
    return pairs
