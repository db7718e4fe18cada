"""Current state of the ranks, one row each.

The ranks' agents answer while a cell runs, even if it hangs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np

from ddp_notebook.messages.ranks import Vitals
from ddp_notebook.observe.steps.run import run_of
from ddp_notebook.observe.tables.matching import label_of
from ddp_notebook.records.schema import Rows
from ddp_notebook.records.words import line_of
from ddp_notebook.run.groups.diagnosis import Absences, list_with_host, stuck, verdict
from ddp_notebook.run.groups.rank_view import RankView, Views
from ddp_notebook.widgets.feed.feed import Feed
from ddp_notebook.widgets.feed.tables import empty

LEFT = "left"  # state of a rank that has left the group
_PERIOD_S = 1.0  # between two probes
_ANSWER_S = 0.3  # time in which ranks must answer
_SELDOM = 50  # the numbers of a run are computed again after this many times the duration of one computation
_STUCK_S = 3.0  # a cell is stuck if a rank waits longer


class MonitorSource(Protocol):
    """Interface of the sources that a monitor shows.

    Implemented by `run.cells.cells.Cells` for a session and by `torchrun.shown.ShownJob`.
    """

    @property
    def is_running(self) -> bool: ...
    @property
    def under_way(self) -> Any:
        """Return the running cell, identified by its `number`; None if no cell runs."""

    @property
    def probe(self) -> ProbeSource: ...
    def press_stop(self) -> str:
        """Handle the stop button of a view. Return a message about the result. Thread-safe."""


class ProbeSource(Protocol):
    """The methods of `run.groups.probe.RankProbe` that `LiveStatus` calls. A run comes from `under_way`."""

    def ask(self, run: Any) -> dict[int, Future[Vitals]]: ...
    def views(self, run: Any, answers: Mapping[int, Vitals], silent: Mapping[int, str]) -> Views: ...
    def gone(self) -> dict[int, str]: ...


class LiveStatus:
    """State of the ranks of a session.

    Never blocks: one call of `look` sends the requests, and a later call collects the answers.

    Args:
        feed: Feed that sends the rows.
        session: Source of the state; None for a recording without a session.
        title: Title of the session.
    """

    def __init__(self, feed: Feed, session: MonitorSource | None, title: str) -> None:
        self._feed = feed
        self._session = session
        self._title = title
        self._asked: tuple[Any, float, dict[int, Future[Vitals]]] | None = None
        self._next_s = 0.0
        self._alone = "running" if feed.is_live else "recorded"  # state of a recording without a session
        self._cell = feed.cell
        self._state, self._why = self._alone if session is None else "idle", ""
        self._has_ended = False
        self._numbers = _Numbers(feed)

    def end(self) -> None:
        """Mark the session as ended."""
        self._has_ended = self._session is not None

    def head(self) -> dict[str, Any]:
        """Return the part of a message header that describes the session.

        `label` is the name of the cell, such as "In [6]". `training` holds the numbers of the shown training run
        (`TrainingRun.to_json`), or None if there is none. Views show its `per_step` and `definition` unchanged.
        """
        session, state, cell = self._session, self._state, self._cell
        if session is not None and (self._has_ended or not session.is_running):
            state = "stopped"
        elif session is None:
            cell = self._feed.cell
        else:
            run = session.under_way
            if run is None:
                state = "idle"
            else:
                cell = self._cell = run.number
                state = "stuck" if self._state == "stuck" else "running"
        return {
            "state": state,
            "cell": cell,
            "title": self._title,
            "why": self._why if state == "stuck" else "",
            **self._numbers.look(cell),
        }

    def behind_s(self) -> float | None:
        """Return new rows of `rank`; None if no probe is due, or if answers are still missing."""
        return self._numbers.behind_s()

    def look(self, now_s: float) -> Rows | None:
        """Rows of `rank` where they are new; None: it is not time, or answers are still to come."""
        if self._asked is not None:
            run, asked_s, futures = self._asked
            if not all(one.done() for one in futures.values()) and now_s - asked_s < _ANSWER_S:
                return None
            self._asked = None
            answers = {rank: one.result() for rank, one in futures.items() if one.done()}
            silent = {rank: "" for rank in futures if rank not in answers}
            assert self._session is not None
            views = self._session.probe.views(run, answers, silent)
            self._judge(views)
            return self._rows(views)
        if now_s < self._next_s:
            return None
        self._next_s = now_s + _PERIOD_S
        running = self._session.under_way if self._session is not None and self._session.is_running else None
        if running is None:
            self._state, self._why = self._alone if self._session is None else "idle", ""
            return self._rows({})
        assert self._session is not None
        self._asked = running, now_s, self._session.probe.ask(running)
        return None

    @property
    def is_asking(self) -> bool:
        return self._asked is not None

    def _judge(self, views: Views) -> None:
        longest = max((view.since_s for view in views.values()), default=0.0)
        is_stuck = longest > _STUCK_S or (self._state == "stuck" and bool(stuck(views)))
        self._state, self._why = ("stuck", verdict(views)) if is_stuck else ("running", "")

    def _rows(self, views: Views) -> Rows:
        feed = self._feed
        rows = empty("rank", feed.world_size)
        resources, last = feed.resources[: len(rows)], feed.last
        rows["rank"] = np.arange(len(rows))
        rows["cpu"], rows["gpu"], rows["gpu_total"] = resources["cpu_percent"], resources["gpu_percent"], np.nan
        for name in ("rss", "host_used", "host_total", "gpu_allocated"):
            rows[name] = np.where(resources[f"{name}_bytes"] > 0, resources[f"{name}_bytes"], np.nan)
        is_known = (resources["time_ns"] > 0) & (rows["rank"] < feed.recording.present)
        for name in ("rss", "gpu_allocated"):
            rows[name][~is_known] = np.nan
        rows["cpu"][~is_known] = rows["gpu"][~is_known] = np.nan
        end_ns = feed.end_ns if self._session is None else time.monotonic_ns()
        rows["time"] = (end_ns - feed.start_ns) / 1e6
        recording = feed.recording
        words = _Words(views)
        gone = self._session.probe.gone() if self._session is not None and self._session.is_running else {}
        for rank in range(len(rows)):
            call = last[rank]
            if call["op"]:
                site = recording.text(int(call["site"]))
                text = f"{recording.text(int(call['op']))} #{int(call['number'])}" + (f", {site}" if site else "")
                rows["last"][rank] = feed.texts.own(text)
            if rank < recording.present:
                state, line, waits_for = self._words(views.get(rank), words, gone.get(rank))
            else:
                state, line, waits_for = LEFT, "", ""
            rows["state"][rank] = feed.texts.own(state)
            rows["line"][rank] = feed.texts.own(line)
            rows["waits_for"][rank] = feed.texts.own(waits_for)
        return rows

    def _words(self, view: RankView | None, words: _Words, how_it_died: str | None) -> tuple[str, str, str]:
        """Return the state of a rank, the line it executes, and the call and ranks it waits for."""
        if view is None:
            if how_it_died is not None:
                return "died", how_it_died, ""
            if self._session is None:
                return self._alone, "", ""
            return ("idle" if self._session.is_running else "stopped"), "", ""
        waits_for = ""
        if view.operation is not None:
            others = words.awaited_by(view.rank)
            place = line_of(view.place)
            where = f" ({place})" if place else ""
            waits_for = (f"{others} in " if others else "") + f"{view.operation.short}{where}"
            if not others:  # all are there: data moves
                return "communicating", view.place, ""
        return view.state, view.place, waits_for


class _Numbers:
    """The label of the shown cell and the numbers of its training run. They are computed at most once a second."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._cell = -1
        self._end = -1  # end of the spans that were read
        self._next_s = 0.0
        self._found: dict[str, Any] = {}

    def behind_s(self) -> float | None:
        """See `LiveStatus.behind_s`."""
        if self._end == self._feed.recording.store.rings["span"].end:
            return None
        return max(0.0, self._next_s - time.monotonic())

    def look(self, cell: int) -> dict[str, Any]:
        """Return `label` and `training`.

        Args:
            cell: The running cell, or else the last one; 0 if there is none.
        """
        recording, now_s = self._feed.recording, time.monotonic()
        end = recording.store.rings["span"].end
        if cell != self._cell or (end != self._end and now_s >= self._next_s):
            self._cell, self._end = cell, end
            run = run_of(recording, self._feed.only)
            self._found = {
                "label": label_of(recording, cell) if cell else "",
                "training": None if run is None else run.to_json(),
            }
            took_s = time.monotonic() - now_s
            self._next_s = now_s + max(_PERIOD_S, _SELDOM * took_s)
        return self._found


class _Words:
    """Texts that list the ranks which a rank waits for. Ranks share these texts."""

    def __init__(self, views: Views) -> None:
        self._views = views
        self._absences = Absences(views)
        self._of: dict[frozenset[int], str] = {}

    def awaited_by(self, rank: int) -> str:
        absent = self._absences[rank]
        if absent not in self._of:
            self._of[absent] = list_with_host(self._views, sorted(absent)) if absent else ""
        return self._of[absent]
