"""Point-to-point communication, drawn from the recording: waits, races, and the end of a deadlock."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddp_notebook.errors import CellTimeoutError, UsageError
from ddp_notebook.lessons.lesson_cells import RUN_S, LessonRunner, running
from ddp_notebook.lessons.lesson_display import DisplayedLesson
from ddp_notebook.lessons.messages.message_scenes import STORIES
from ddp_notebook.lessons.messages.transfer_picture import PARTS, call_spans

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ddp_notebook.display import Picture
    from ddp_notebook.lessons.lesson import Wish
    from ddp_notebook.observe.views import Collective
    from ddp_notebook.session import Session

_HANG_S = 2.0  # time for which a deadlock is shown before it is ended
_LONGEST_CARD_S = 3.0  # the scene waits for a hang card that appears within this time
_BUSY = "_lesson_busy"  # variable with the times at which a rank worked


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One send, receive or piece of own work of a rank, in milliseconds since the first event."""

    rank: int
    what: str  # "send", "recv", "isend", "irecv" or "work"
    peer: int | None
    tag: int
    nbytes: int
    start_ms: float
    end_ms: float
    blocked_ms: float  # time for which the rank was blocked by it
    is_over: bool  # it has ended without an interrupt

    def __repr__(self) -> str:
        toward = "" if self.peer is None else f" {'to' if 'send' in self.what else 'from'} rank {self.peer}"
        end = f"{self.end_ms:.0f}" if self.is_over else "never"
        return (
            f"<rank {self.rank}: {self.what}{toward}, {self.start_ms:.0f} to {end} ms, blocked {self.blocked_ms:.0f}>"
        )


class Scene(DisplayedLesson):
    """One scene of point-to-point communication, played on the running ranks.

    Args:
        name: One of `STORIES`: "blocking", "nonblocking", "race", "no race", "any source", "tags", "deadlock".
        session: Session to use; None for the running one.

    Raises:
        UsageError: There is no such scene.
        NoSessionError: No ranks are running.

    Example:
        >>> scene = lessons.point_to_point("blocking")
        >>> scene.waits[0]
        'rank 0 waited ... ms for rank 1'
    """

    def __init__(self, name: str = "blocking", session: Session | None = None) -> None:
        self._runner = LessonRunner(running(session))
        self.name = name
        self.play(name)

    def play(self, name: str | None = None) -> Scene:
        """Play the scene again, or another one."""
        name = self.name if name is None else name
        if name not in STORIES:
            raise UsageError(f"the scene must be one of {', '.join(STORIES)}, got {name!r}")
        self.name = name
        self.story = STORIES[name]
        self.error = ""
        self._runner.mark()
        began_s = time.monotonic()
        try:
            self._runner.run(_cell(self.story.code), self._limit_s(), quiet=name != "deadlock")
            self.values: dict[int, Any] = self._runner.pull("_lesson_told")
        except CellTimeoutError as error:
            self.values, self.error = {}, str(error)
        self.seconds = time.monotonic() - began_s
        self.events = self._events()
        return self

    def _limit_s(self) -> float:
        if self.name != "deadlock":
            return RUN_S
        # A session that was started with `--hang-after 1` shows its card first.
        card_s = self._runner.session.options.hang_after_s
        return card_s + 1 if card_s is not None and card_s <= _LONGEST_CARD_S else _HANG_S

    @property
    def waits(self) -> list[str]:
        """Return sentences about waits of at least 5 ms between ranks."""
        found = []
        for event in self.events:
            if event.what != "work" and event.blocked_ms >= 5 and event.is_over:
                whom = "any rank" if event.peer is None else f"rank {event.peer}"
                found.append(f"rank {event.rank} waited {event.blocked_ms:.0f} ms for {whom}")
            elif not event.is_over:
                found.append(f"rank {event.rank} waited for rank {event.peer} in {event.what} until it was stopped")
        return found

    @property
    def world_size(self) -> int:
        return self._runner.session.world_size

    @property
    def arrows(self) -> list[tuple[int, int]]:
        """Return pairs of matching sends and receives, as indexes of `events`: in order, for each pair of ranks and
        tag."""
        sends: dict[tuple[int, int | None, int], list[int]] = {}
        for at, event in enumerate(self.events):
            if "send" in event.what:
                sends.setdefault((event.rank, event.peer, event.tag), []).append(at)
        found = []
        came_from = iter(self.values.get(0) or ()) if self.name == "any source" else iter(())
        for at, event in enumerate(self.events):
            if "recv" in event.what:
                source = next(came_from, None) if event.peer is None else event.peer
                if source is not None and (waiting := sends.get((source, event.rank, event.tag))):
                    found.append((waiting.pop(0), at))
        return found

    @property
    def spans(self) -> list[list[tuple[float, float, str]]]:
        """Return by event its time in parts: (start, end, part), in milliseconds. Own work is "compute"."""
        both = {
            at: max(self.events[one].start_ms for one in pair)
            for pair in self.arrows
            if all(self.events[one].is_over for one in pair)
            for at in pair
        }
        return [
            [(event.start_ms, event.end_ms, "compute")]
            if event.what == "work"
            else call_spans(event.start_ms, event.end_ms, _blocked(event), both.get(at))
            for at, event in enumerate(self.events)
        ]

    @property
    def changed(self) -> float | None:
        """Return the share of the received numbers that differ from those at isend; None if the scene is not a race."""
        if self.name not in ("race", "no race") or 1 not in self.values:
            return None
        return sum(value != 1 for value in self.values[1]) / len(self.values[1])

    @property
    def said(self) -> list[str]:
        """Return sentences about the outcome."""
        found = list(self.waits)
        if self.changed is not None:
            found.append(
                f"rank 1 has {1 - self.changed:.0%} of the numbers as they were at isend, {self.changed:.0%} changed"
            )
        elif self.name == "any source" and 0 in self.values:
            found.append(f"rank 0 got them from {', '.join(f'rank {one}' for one in self.values[0])}, in this order")
        elif self.name == "tags" and 1 in self.values:
            found.append("; ".join(f"tag {tag} brought {value:g}" for tag, value in self.values[1]))
        if self.error:
            found.append(f"stopped after {self.seconds:.1f} s; the group and all variables are kept")
        return found

    def picture(self) -> Figure:
        """Return a figure with a row for each rank and an arrow for each message. It stays in a saved notebook."""
        return _draw(self)

    # ---- in the browser

    def state(self) -> dict[str, Any]:
        """Return everything that the browser draws."""
        return {
            "kind": "messages",
            "world_size": self.world_size,
            "name": self.name,
            "stories": [(name, story.title) for name, story in STORIES.items()],
            "title": self.story.title,
            "lesson": self.story.lesson,
            "code": self.story.code,
            "events": [
                {
                    "rank": event.rank,
                    "what": event.what,
                    "peer": event.peer,
                    "tag": event.tag,
                    "nbytes": event.nbytes,
                    "start": event.start_ms,
                    "end": event.end_ms,
                    "spans": spans,
                    "over": event.is_over,
                }
                for event, spans in zip(self.events, self.spans, strict=True)
            ],
            "parts": {"compute": "own work", **PARTS},
            "arrows": self.arrows,
            "said": self.said,
            "message": self.error,
            "strip": self.values.get(1) if self.changed is not None else None,
        }

    def act(self, wish: Wish) -> None:
        """Handle the request "play" of the browser.

        Raises:
            UsageError: There is no such scene.
        """
        if wish["do"] == "play":
            self.play(wish.get("name"))

    def __repr__(self) -> str:
        return f"<Scene {self.name}: {'; '.join(self.said) or 'no rank waited'}>"

    # ---- what was recorded

    def _events(self) -> list[Event]:
        calls = [call for call in self._runner.calls() if call.is_point_to_point]
        busy = self._busy()
        starts = [call.issue_ns for call in calls] + [start for _, start, _ in busy]
        if not starts:
            return []
        origin = min(starts)
        ends = [call.end_ns or 0 for call in calls] + [end for _, _, end in busy]
        last = max(*ends, origin + (int(self.seconds * 1e9) if self.error else 0))
        found = [_event(call, origin, last) for call in calls]
        found += [
            Event(
                rank=rank,
                what="work",
                peer=None,
                tag=0,
                nbytes=0,
                start_ms=(start - origin) / 1e6,
                end_ms=(end - origin) / 1e6,
                blocked_ms=0,
                is_over=True,
            )
            for rank, start, end in busy
        ]
        return sorted(found, key=lambda event: (event.rank, event.start_ms))

    def _busy(self) -> Sequence[tuple[int, int, int]]:
        clock = self._runner.session.recording.clock
        return [
            (rank, *(int(one) for one in clock.to_notebook(rank, _times(start, end))))  # type: ignore[misc]
            for rank, spans in self._runner.pull(_BUSY).items()
            for start, end in spans
        ]


def point_to_point(name: str = "blocking", session: Session | None = None) -> Scene:
    """Play a scene of sends and receives on the ranks; see `Scene`."""
    return Scene(name, session)


def _event(call: Collective, origin: int, last: int) -> Event:
    is_over = call.end_ns is not None and call.state not in ("failed", "issued")
    end = call.end_ns if is_over and call.end_ns is not None else last
    start = call.issue_ns
    return Event(
        rank=call.rank,
        what=f"i{call.op}" if call.is_async else call.op,
        peer=call.peer,
        tag=call.tag,
        nbytes=call.nbytes,
        start_ms=(start - origin) / 1e6,
        end_ms=(max(end, start) - origin) / 1e6,
        blocked_ms=(call.blocked_ns if is_over else last - start) / 1e6,
        is_over=is_over,
    )


def _cell(code: str) -> str:
    """Return the cell with the scene's code in a function, so that it does not change the user's variables."""
    return "\n".join(
        [
            "import time as _lesson_time",
            f"{_BUSY} = []",
            "_lesson_told = None",
            "def _lesson_work_for(ms):",
            "    began = _lesson_time.monotonic_ns()",
            "    _lesson_time.sleep(ms / 1000)",
            f"    {_BUSY}.append((began, _lesson_time.monotonic_ns()))",
            "def _lesson_scene(work_for):",
            *(f"    {line}" for line in code.splitlines()),
            "    return told",
            "dist.barrier()",
            "_lesson_told = _lesson_scene(_lesson_work_for)",
        ]
    )


def _times(*values: int) -> Any:
    import numpy as np

    return np.array(values, np.int64)


def _draw(scene: Scene) -> Picture:
    """Draw a row for each rank, with time to the right."""
    from matplotlib.patches import FancyArrowPatch, Rectangle

    from ddp_notebook.display import INK, fill_style, key, picture

    has_strip = scene.changed is not None
    ranks = sorted({event.rank for event in scene.events}) or [0]
    n = len(ranks)
    row = {rank: at for at, rank in enumerate(ranks)}
    figure, (axes, *more) = picture(
        f"{scene.story.title}: {'; '.join(scene.said[:2]) or 'no rank waited'}",
        1.2 + 0.6 * n + 0.7 * has_strip,
        [n, 0.7] if has_strip else [1.0],
    )
    end = max((event.end_ms for event in scene.events), default=1.0)
    axes.set(xlim=(-0.01 * end, end * 1.03), ylim=(n - 0.4, -0.6), yticks=range(n))
    axes.set_yticklabels([f"rank {rank}" for rank in ranks])
    axes.set_xlabel("time (ms)", color=INK, fontsize=9)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(False, axis="y")
    used = set()
    for event, spans in zip(scene.events, scene.spans, strict=True):
        top = row[event.rank] - (0.42 if event.what == "work" else 0.14)
        for start, stop, part in spans:
            used.add(part)
            axes.add_patch(Rectangle((start, top), max(stop - start, end / 300), 0.26, **fill_style(part)))
    for rank in ranks:
        for x, label in _labels([event for event in scene.events if event.rank == rank], end):
            axes.text(x, row[rank] + 0.3, label, fontsize=8, color=INK, va="center")
    for sent, received in scene.arrows:
        one, other = scene.events[sent], scene.events[received]
        if one.is_over and other.is_over:
            axes.add_patch(
                FancyArrowPatch(
                    (max(one.start_ms, other.start_ms), row[one.rank]),
                    (other.end_ms, row[other.rank]),
                    arrowstyle="-|>",
                    mutation_scale=9,
                    color=INK,
                    lw=1.2,
                    zorder=4,
                )
            )
    if has_strip:
        _strip(more[0], scene.values[1])
    words = {"compute": "own work", **PARTS}
    key(figure, [part for part in words if part in used], words=words)
    return figure


def _blocked(event: Event) -> float:
    """Return for how long a call blocked its program: send and recv from their beginning to their end."""
    return event.blocked_ms if event.what.startswith("i") else event.end_ms - event.start_ms


def _labels(events: Sequence[Event], end_ms: float) -> list[tuple[float, str]]:
    """Return the names of the calls of a rank with their positions. Names that would overlap are joined."""
    found: list[tuple[float, str]] = []
    for event in events:
        if event.what == "work":
            continue
        label = event.what + ("" if event.is_over else " (never returns)")
        if found and event.start_ms - found[-1][0] < 0.014 * end_ms * (len(found[-1][1]) + 2):
            found[-1] = found[-1][0], f"{found[-1][1]}, {label}"
        else:
            found.append((event.start_ms, label))
    return found


def _strip(axes: Axes, values: Sequence[float]) -> None:
    """Draw the values of the receiver, from the first element to the last."""
    from matplotlib.patches import Rectangle

    from ddp_notebook.display import INK, LINES

    for at, value in enumerate(values):
        as_sent = value == 1
        axes.add_patch(Rectangle((at, 0 if as_sent else 0.3), 1.05, 1 if as_sent else 0.4, facecolor=LINES[0], lw=0))
    axes.set(xlim=(0, len(values)), ylim=(0, 1), yticks=[], xticks=[])
    axes.spines[:].set_visible(False)
    changed = sum(value != 1 for value in values) / len(values)
    axes.set_xlabel(
        f"data received by rank 1, first element to last: high as at isend, low changed after it ({changed:.0%})",
        fontsize=8,
        color=INK,
    )
