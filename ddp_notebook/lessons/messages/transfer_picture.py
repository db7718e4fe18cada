"""Picture of the sends and receives of a cell, drawn from the recording."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddp_notebook.display import INK
from ddp_notebook.errors import UsageError
from ddp_notebook.records.units import ms, size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ddp_notebook import Recording
    from ddp_notebook.display import Picture
    from ddp_notebook.observe.views import Collective

_SHORTEST = 0.004  # shortest bar, as a share of the width, so that it is visible
# The parts of a call, with the colours that all pictures use for them.
PARTS = {
    "hidden": "message under way, the program runs",
    "waiting": "blocked: the other rank has not called",
    "exposed": "blocked: message under way",
}


def exchanges(recording: Recording | None = None, cell: int | None = None) -> Picture:
    """Draw a row for the sends of each rank, a row for its receives, and an arrow for each message.

    Colours are those of all pictures of communication. Light blue: the message is under way and the program runs on
    (`isend`, `irecv`). Outline: the program is blocked and the other rank has not called yet. Orange: the program is
    blocked and both ranks have called.

    Args:
        recording: Recording to draw; None for that of the running session.
        cell: Number of the cell; None for the last one that sent something.

    Raises:
        UsageError: Nothing was sent.

    Example:
        >>> exchanges(session.recording).savefig("exchanges.png")
    """
    from ddp_notebook.display import key, picture

    calls = _calls(_running() if recording is None else recording, cell)
    rows = sorted({(call.rank, call.op != "send") for call in calls})
    start_ns = min(call.issue_ns for call in calls)
    end_ns = max(call.end_ns or call.issue_ns for call in calls)
    messages = _messages(calls)
    figure, (axes,) = picture(_title(messages, end_ns - start_ns), 1.15 + 0.3 * len(rows))
    timeline = _Timeline(axes=axes, rows=rows, start_ns=start_ns, width_ns=end_ns - start_ns or 1)
    both_ns = {id(call): max(one.issue_ns for one in pair) for pair in messages for call in pair}
    used = set()
    for call in calls:
        used |= timeline.draw_call(call, both_ns.get(id(call)))
    for sent, received in messages:
        timeline.draw_message(sent, received)
    timeline.label_axes()
    key(figure, [part for part in PARTS if part in used], words=PARTS)
    return figure


def call_spans(start: float, end: float, blocked: float, both: float | None) -> list[tuple[float, float, str]]:
    """Divide the time of a send or receive into (start, end, part), with the parts of `PARTS`.

    Args:
        start: Time of the call.
        end: Time at which the message was complete, in the unit of `start`.
        blocked: Time for which the call blocked the program, the last part of it.
        both: Time at which both ranks had called; None if the other rank never did.

    Example:
        >>> call_spans(0, 500, 200, 400)
        [(0, 300, 'hidden'), (300, 400, 'waiting'), (400, 500, 'exposed')]
    """
    blocked_from = end - min(blocked, end - start)
    moving_from = end if both is None else min(max(both, blocked_from), end)
    found = [(start, blocked_from, "hidden"), (blocked_from, moving_from, "waiting"), (moving_from, end, "exposed")]
    return [one for one in found if one[1] > one[0]]


def _title(messages: Sequence[tuple[Collective, Collective]], width_ns: int) -> str:
    moved = sum(sent.nbytes for sent, _ in messages)
    many = "s" if len(messages) != 1 else ""
    return f"{len(messages)} message{many}, {size(moved)}, in {ms(width_ns)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timeline:
    """Axes with time from left to right, and rows for the sends and for the receives of each rank."""

    axes: Axes
    rows: Sequence[tuple[int, bool]]  # (rank, whether it receives)
    start_ns: int
    width_ns: int

    @property
    def unit(self) -> tuple[str, float]:
        """Return the unit of the time axis, and its nanoseconds."""
        return ("s", 1e9) if self.width_ns > 2e9 else ("ms", 1e6)

    def draw_call(self, call: Collective, both_ns: int | None) -> set[str]:
        """Draw a bar with the parts of the call. Return these parts."""
        from matplotlib.patches import Rectangle

        from ddp_notebook.display import fill_style

        end_ns = call.end_ns or self.start_ns + self.width_ns
        blocked_ns = call.blocked_ns if call.is_async else end_ns - call.issue_ns
        spans = call_spans(call.issue_ns, max(end_ns, call.issue_ns + 1), blocked_ns, both_ns)
        for start, end, part in spans:
            length = max(end - start, _SHORTEST * self.width_ns) / self.unit[1]
            corner = self._position(start), self._row(call) - 0.32
            self.axes.add_patch(Rectangle(corner, length, 0.64, **fill_style(part)))
        return {part for _, _, part in spans}

    def _row(self, call: Collective) -> int:
        return self.rows.index((call.rank, call.op != "send"))

    def draw_message(self, sent: Collective, received: Collective) -> None:
        """Draw an arrow from the sender's row to the receiver's, if both calls have ended."""
        if sent.end_ns is None or received.end_ns is None:
            return
        self.axes.annotate(
            "",
            xytext=(self._position(max(received.issue_ns, sent.issue_ns)), self._row(sent)),
            xy=(self._position(received.end_ns), self._row(received)),
            arrowprops={"arrowstyle": "->", "color": INK},
        )

    def label_axes(self) -> None:
        """Set the limits, the rank names and the time unit."""
        unit, unit_ns = self.unit
        self.axes.set_xlim(-0.02 * self.width_ns / unit_ns, 1.04 * self.width_ns / unit_ns)
        self.axes.set_ylim(len(self.rows) - 0.4, -0.6)
        names = [f"rank {rank} {'recv' if is_recv else 'send'}" for rank, is_recv in self.rows]
        self.axes.set_yticks(range(len(self.rows)), names)
        self.axes.grid(visible=False, axis="y")
        self.axes.set_xlabel(f"time ({unit})")

    def _position(self, moment_ns: float) -> float:
        return (moment_ns - self.start_ns) / self.unit[1]


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
