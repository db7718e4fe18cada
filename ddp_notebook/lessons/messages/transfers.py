"""The picture of a cell's sends and receives, as the ranks recorded them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddp_notebook.errors import UsageError

if TYPE_CHECKING:
    from ddp_notebook import Recording
    from ddp_notebook.display import Picture
    from ddp_notebook.observe.views import Collective

_SHORTEST = 0.004  # of a bar, as a share of the width; shorter ones would not be seen
_COLOURS = {"send": "#D55E00", "recv": "#0072B2"}


def exchanges(recording: Recording | None = None, cell: int | None = None) -> Picture:
    """A line of time for each rank: orange while it sends, blue while it receives, an arrow for each message.

    A full bar is time in which the rank's program stood still. An outline is a transfer that went on while the program
    did something else (`isend`, `irecv`).

    Args:
        recording: of the running session, if none is given.
        cell: number of the cell; the last one that sent something, if none is given.

    Raises:
        UsageError: nothing was sent.

    Example:
        >>> exchanges(session.recording).savefig("exchanges.png")
    """
    from matplotlib.patches import Patch, Rectangle

    from ddp_notebook.display import INK, picture

    calls = _calls(_running() if recording is None else recording, cell)
    began = min(call.issue_ns for call in calls)
    width = max(call.end_ns or call.issue_ns for call in calls) - began or 1
    ranks = sorted({call.rank for call in calls} | {rank for call in calls for rank in call.ranks})
    figure, (axes,) = picture("", 0.9 + 0.45 * len(ranks))
    figure.suptitle("")
    unit, unit_ns = ("s", 1e9) if width > 2e9 else ("ms", 1e6)

    def bar(call: Collective, start_ns: int, end_ns: int, full: bool) -> None:
        colour = _COLOURS[call.op]
        length = max(end_ns - start_ns, _SHORTEST * width) / unit_ns
        corner, offset = (start_ns - began) / unit_ns, 0.16 if call.op == "send" else -0.16
        axes.add_patch(
            Rectangle(
                (corner, ranks.index(call.rank) - offset - 0.13), length, 0.26, fc=colour if full else "none", ec=colour
            )
        )

    for call in calls:
        end_ns = call.end_ns or began + width
        bar(call, call.issue_ns, end_ns, full=not call.is_async)
        if call.is_async and call.blocked_ns > 0.05 * (end_ns - call.issue_ns):
            bar(call, end_ns - min(call.blocked_ns, end_ns - call.issue_ns), end_ns, full=True)
    for sent, received in _messages(calls):
        if sent.end_ns is None or received.end_ns is None:
            continue
        at = (max(received.issue_ns, sent.issue_ns) - began) / unit_ns
        axes.annotate(
            "",
            xytext=(at, ranks.index(sent.rank)),
            xy=((received.end_ns - began) / unit_ns, ranks.index(received.rank)),
            arrowprops={"arrowstyle": "->", "color": INK},
        )
    axes.set_xlim(-0.02 * width / unit_ns, 1.04 * width / unit_ns)
    axes.set_ylim(len(ranks) - 0.4, -0.6)
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axes.set_xlabel(unit)
    keys = [Patch(fc=colour, ec=colour, label=f"stands still in {op}") for op, colour in _COLOURS.items()]
    if any(call.is_async for call in calls):
        keys.append(Patch(fc="none", ec=INK, label="under way, the program goes on"))
    figure.legend(handles=keys, loc="outside upper left", ncols=3, frameon=False, fontsize=9, labelcolor=INK)
    return figure


def _running() -> Recording:
    from ddp_notebook.session import current

    session = current()
    if session is None:
        raise UsageError("no ranks run whose messages could be drawn; start some: %ddp_start 4")
    return session.recording


def _calls(recording: Recording, cell: int | None) -> list[Collective]:
    found = [call for call in recording.collectives(cell=cell) if call.is_point_to_point]
    last = max((call.cell for call in found), default=None)
    if last is None:
        raise UsageError("nothing was sent from one rank to another" + (f" in cell {cell}" if cell is not None else ""))
    return [call for call in found if call.cell == last]


def _messages(calls: list[Collective]) -> list[tuple[Collective, Collective]]:
    """Each send with the receive that got it: the n-th from a rank to another, by tag. A receive from anybody got the
    one that ended with it."""
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
