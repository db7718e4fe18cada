"""What a page is drawn from: a feed, which somebody else brings up to date, and the courses of metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ddp_notebook.observe.views import main_metric
from ddp_notebook.records.schema import Rows
from ddp_notebook.widgets.feed.feed import Feed
from ddp_notebook.widgets.feed.tables import empty
from ddp_notebook.widgets.html import step_bars
from ddp_notebook.widgets.html.rank_table import RankRow
from ddp_notebook.widgets.html.series import Series, add_rows
from ddp_notebook.widgets.live_status import LEFT

_MOST_METRICS = 32  # that are followed
_STATES = ("running", "stuck")  # in which ranks are somewhere


@dataclass(frozen=True, slots=True, kw_only=True)
class PageState:
    """What one redraw shows."""

    title: str  # of the session
    state: str  # "running", "stuck", "idle", "stopped" or "recorded"
    cell: str  # "In [5]"; "": none
    why: str  # it hangs, in a sentence
    courses: Mapping[str, Series]  # the main one first
    steps: Rows  # of the feed's table `step`, of one cell
    run: Mapping[str, Any] | None  # the numbers of its training run, see `LiveStatus.head`
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
        self._courses: dict[int, Series] = {}  # the series of a metric, by the number of its name
        self._names = np.zeros(0, np.int64)  # numbers of all names that were logged

    def look(self, head: Mapping[str, Any]) -> PageState:
        """What there is now.

        Args:
            head: `LiveStatus.head()`.
        """
        feed, recording = self._feed, self._feed.recording
        if self._end:
            rows, self._end, _ = recording.follow("metric", self._end)
        else:  # also those that the table has given up
            self._end = recording.store.rings["metric"].end
            rows = recording._metrics_until(self._end)
        rows = rows[rows["rank"] < feed.world_size]
        rows = rows if feed.only is None else rows[rows["cell"] == feed.only]
        add_rows(self._courses, rows, len(feed.last), _MOST_METRICS)
        self._names = np.union1d(self._names, rows["name"])
        named = {recording.text(name): course for name, course in self._courses.items()}
        if named:
            main = main_metric(named)
            named = {main: named.pop(main), **named}
        steps = feed.kept("step")
        steps = steps[steps["cell"] == steps["cell"].max(initial=0)]
        return PageState(
            title=head["title"],
            state=head["state"],
            cell=head["label"],
            why=head["why"],
            courses=named,
            steps=steps,
            run=head["training"],
            ranks=self._ranks(steps, next(iter(named.values()), None), has_places=head["state"] in _STATES),
            notes=_notes(feed.notes(), len(self._names) - len(self._courses)),
        )

    def _ranks(self, steps: Rows, main: Series | None, *, has_places: bool) -> list[RankRow]:
        """A row for each rank, also for one that has left, if it has logged or taken steps here.

        Args:
            steps: of one cell.
            main: the metric whose last value is told.
            has_places: a cell runs, so that ranks are somewhere.
        """
        text, world_size = self._feed.texts.text, self._feed.world_size
        now, hosts = self._feed.ranks, self._feed.recording.hosts
        if not len(now):
            now = empty("rank", world_size)
            now["cpu"] = np.nan
        of_steps = _of_steps(steps, world_size)
        found = []
        for rank in range(world_size):
            state = text(int(now["state"][rank]))
            row = RankRow(
                rank=rank,
                host=hosts[rank] if rank < len(hosts) else "",  # it may have left
                metric=float(main.end[rank]) if main is not None and main.has(rank) else None,
                rss=_known(now["rss"][rank]),
                gpu_bytes=_known(now["gpu_allocated"][rank]),
                **of_steps.get(rank, {}),
            )
            if state == LEFT and row.step is None and row.metric is None:
                continue
            if has_places:
                line, waits_for = (text(int(now[name][rank])) for name in ("line", "waits_for"))
                row = replace(row, state=state, cpu=_cpu(now["cpu"][rank]), line=line, waits_for=waits_for)
            elif state == "died":
                row = replace(row, state=state)
            found.append(row)
        return found


def _of_steps(steps: Rows, world_size: int) -> dict[int, dict[str, Any]]:
    """What `RankRow` has of the last steps, by rank."""
    last = steps[steps["step"].astype(np.int64) > int(steps["step"].max(initial=0)) - step_bars.MOST_BARS]
    found: dict[int, dict[str, Any]] = {}
    for rank in np.unique(last["rank"]).tolist():
        mine = last[last["rank"] == rank]
        if len(mine) > 1:  # the first step of a cell is not like the others
            mine = mine[mine["step"] > 0]
        duration = float(mine["duration"].mean())
        found[rank] = {"step": int(mine["step"].max()), "step_ms": duration}
        if world_size > 1:
            found[rank]["waiting"] = float(mine["waiting"].mean()) / max(duration, 1e-9)
    return found


def _cpu(percent: Any) -> float | None:
    """Of one core. A rank that waits uses none of it, which is known."""
    return None if np.isnan(percent) else float(percent) / 100


def _known(value: Any) -> float | None:
    """None where it is not known, or where there is nothing."""
    return float(value) if value > 0 else None


def _notes(notes: Mapping[str, Any], names: int) -> list[str]:
    """Return what was left out, in words, as the monitor in the browser has it (parts/notices.js).

    Args:
        names: of metrics that are not drawn here.
    """
    found = [f"the first {_MOST_METRICS} metrics are drawn; {names:,} more are not"] if names else []
    if (every := notes["units_shown_of"]) > 1:
        found.append(f"steps: one of {every} is shown")
    if dropped := notes["dropped_rows"]:
        found.append(f"{dropped:,} row{'s' * (dropped != 1)} lost on the ranks")
    return found
