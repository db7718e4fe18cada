"""What a page is drawn from: a feed, which somebody else brings up to date, and the courses of metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddp_notebook.observe.tables.matching import prompt_of
from ddp_notebook.observe.views import main_metric
from ddp_notebook.records.schema import Rows
from ddp_notebook.widgets.feed.feed import Feed
from ddp_notebook.widgets.html import bars
from ddp_notebook.widgets.html.course import Course, add_rows
from ddp_notebook.widgets.html.table import RankRow

_MOST_METRICS = 8
_STATES = ("running", "stuck")  # in which ranks are somewhere


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What one redraw shows."""

    title: str  # of the session
    state: str  # "running", "stuck", "idle", "stopped" or "recorded"
    cell: str  # "3 (In [5])"; "": none
    why: str  # it hangs, in a sentence
    courses: Mapping[str, Course]  # the main one first
    steps: Rows  # of the feed's table `step`, of one cell
    ranks: list[RankRow]
    notes: list[str]  # what is left out


class Sources:
    """Reads what is shown of one recording. For one thread at a time, as its feed.

    Args:
        feed: of the recording.
    """

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._end = 0  # of the metrics that were read
        self._courses: dict[int, Course] = {}  # by the number of the name
        self._prompts: dict[int, str] = {}  # by cell

    def look(self, head: Mapping[str, Any]) -> Shown:
        """What there is now.

        Args:
            head: `Present.head()`.
        """
        feed, recording = self._feed, self._feed.recording
        rows, self._end, _ = recording.follow("metric", self._end)
        rows = rows[rows["rank"] < recording.world_size]
        rows = rows if feed.only is None else rows[rows["cell"] == feed.only]
        add_rows(self._courses, rows, recording.world_size, _MOST_METRICS)
        named = {recording.text(name): course for name, course in self._courses.items()}
        if named:
            main = main_metric(named)
            named = {main: named.pop(main), **named}
        steps = feed.kept("step")
        steps = steps[steps["cell"] == steps["cell"].max(initial=0)]
        return Shown(
            title=head["title"],
            state=head["state"],
            cell=self._name(head["cell"], is_over=head["state"] not in _STATES),
            why=head["why"],
            courses=named,
            steps=steps,
            ranks=self._ranks(steps, next(iter(named.values()), None), has_places=head["state"] in _STATES),
            notes=_notes(feed.notes()),
        )

    def _name(self, cell: int, *, is_over: bool) -> str:
        """Its number, and the prompt by which its reader knows it, which it has when it is over."""
        if not cell:
            return ""
        if is_over and cell not in self._prompts:
            self._prompts[cell] = prompt_of(self._feed.recording, cell)
        prompt = self._prompts.get(cell)
        return f"{cell} ({prompt})" if prompt else f"{cell}"

    def _ranks(self, steps: Rows, main: Course | None, *, has_places: bool) -> list[RankRow]:
        text = self._feed.texts.text
        known = {int(row["rank"]): row for row in self._feed.ranks}
        ranks = np.arange(self._feed.recording.world_size)
        last = steps[steps["step"] > (int(steps["step"].max()) - bars.MOST_BARS if len(steps) else 0)]
        counts = np.bincount(last["rank"], minlength=len(ranks))
        durations = np.bincount(last["rank"], last["duration"], len(ranks))
        waiting = np.bincount(last["rank"], last["waiting"], len(ranks))
        latest = np.full(len(ranks), -1)
        np.maximum.at(latest, last["rank"], last["step"].astype(np.int64))
        is_alone = len(ranks) == 1
        found = []
        for rank in ranks.tolist():
            now = known.get(rank)
            state = "" if now is None else text(int(now["state"]))
            end = main.end[rank] if main is not None else math.nan
            has_steps = counts[rank] > 0
            found.append(
                RankRow(
                    rank=rank,
                    state=state if has_places or state == "died" else "",
                    line=text(int(now["line"])) if now is not None and has_places else "",
                    waits_for=text(int(now["waits_for"])) if now is not None and has_places else "",
                    metric=None if math.isnan(end) else float(end),
                    step=int(latest[rank]) if has_steps else None,
                    step_ms=float(durations[rank] / counts[rank]) if has_steps else None,
                    waiting=float(waiting[rank] / max(durations[rank], 1e-9)) if has_steps and not is_alone else None,
                    cpu=None if now is None or not has_places else _number(now["cpu"] / 100),
                    rss=None if now is None else _number(now["rss"]),
                    gpu_bytes=None if now is None else _number(now["gpu_allocated"]),
                )
            )
        return found


def _number(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None


def _notes(notes: Mapping[str, Any]) -> list[str]:
    """What was left out, in words, as the monitor in the browser says it (parts/notices.js)."""
    found = []
    if (every := notes["units_shown_of"]) > 1:
        found.append(f"steps: one of {every} is shown")
    if dropped := notes["dropped_rows"]:
        found.append(f"{dropped:,} row{'s' * (dropped != 1)} lost on the ranks")
    return found
