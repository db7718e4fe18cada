"""Data of a page: a feed, which its owner keeps up to date, and the series of metrics."""

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

_MOST_METRICS = 32  # metrics that are kept
_STATES = ("running", "stuck")  # states in which ranks execute a line


@dataclass(frozen=True, slots=True, kw_only=True)
class PageState:
    """Content of one redraw."""

    title: str  # title of the session
    state: str  # "running", "stuck", "idle", "stopped" or "recorded"
    cell: str  # "In [5]"; "" if there is none
    why: str  # reason why the cell hangs
    courses: Mapping[str, Series]  # main metric first
    steps: Rows  # rows of the feed's table `step`, of one cell
    run: Mapping[str, Any] | None  # numbers of the training run, see `LiveStatus.head`
    ranks: list[RankRow]
    notes: list[str]  # notes about left-out data


class Sources:
    """Reads the content of pages from one recording. Not thread-safe, like its feed.

    Args:
        feed: Feed of the recording.
    """

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._end = 0  # end of the metric rows that were read
        self._courses: dict[int, Series] = {}  # the series of a metric, by the number of its name
        self._names = np.zeros(0, np.int64)  # numbers of all names that were logged

    def look(self, head: Mapping[str, Any]) -> PageState:
        """Return the current content.

        Args:
            head: `LiveStatus.head()`.
        """
        feed, recording = self._feed, self._feed.recording
        if self._end:
            rows, self._end, _ = recording.follow("metric", self._end)
        else:  # include rows that the table has already dropped
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
        """Return a row for each rank. A rank that has left gets one if it has logged or taken steps.

        Args:
            steps: Steps of one cell.
            main: Metric whose last value is shown.
            has_places: A cell runs, so that ranks execute a line.
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
                host=hosts[rank] if rank < len(hosts) else "",  # the rank may have left
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
    """Return the step fields of `RankRow`, by rank."""
    last = steps[steps["step"].astype(np.int64) > int(steps["step"].max(initial=0)) - step_bars.MOST_BARS]
    found: dict[int, dict[str, Any]] = {}
    for rank in np.unique(last["rank"]).tolist():
        mine = last[last["rank"] == rank]
        if len(mine) > 1:  # the first step of a cell differs from the others
            mine = mine[mine["step"] > 0]
        duration = float(mine["duration"].mean())
        found[rank] = {"step": int(mine["step"].max()), "step_ms": duration}
        if world_size > 1:
            found[rank]["waiting"] = float(mine["waiting"].mean()) / max(duration, 1e-9)
    return found


def _cpu(percent: Any) -> float | None:
    """Return the load of one core; 0 is a valid value, because a waiting rank uses no CPU time."""
    return None if np.isnan(percent) else float(percent) / 100


def _known(value: Any) -> float | None:
    """Return the value, or None if it is not positive and so not known."""
    return float(value) if value > 0 else None


def _notes(notes: Mapping[str, Any], names: int) -> list[str]:
    """Return notes about left-out data, with the same texts as the monitor in the browser (parts/notices.js).

    Args:
        names: Number of metrics that are not drawn.
    """
    found = [f"the first {_MOST_METRICS} metrics are drawn; {names:,} more are not"] if names else []
    if (every := notes["units_shown_of"]) > 1:
        found.append(f"steps: one of {every} is shown")
    if dropped := notes["dropped_rows"]:
        found.append(f"{dropped:,} row{'s' * (dropped != 1)} lost on the ranks")
    return found
