"""What the ranks did: `session.recording`, or what `ddp_notebook.load` has read from files."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ddp_notebook.errors import UsageError
from ddp_notebook.observe.clock import Clock
from ddp_notebook.observe.tables import frames
from ddp_notebook.observe.tables.collectives import Collectives, group_of, preview_of, shapes_of
from ddp_notebook.observe.tables.store import Store
from ddp_notebook.observe.views import BucketLayout, Gradient, Layout, Metric, Preview
from ddp_notebook.records.codec import Batch
from ddp_notebook.records.operation import OPERATIONS
from ddp_notebook.records.schema import SIDES, TABLES, TIMES, Rows

if TYPE_CHECKING:
    import os
    from pathlib import Path

    from matplotlib.figure import Figure

    from ddp_notebook.observe.report.report import Report
    from ddp_notebook.observe.views import Bandwidth, Step, Straggler, Wait

_LOCAL, _SYNCHRONISED = SIDES.index("local gradient"), SIDES.index("synchronised gradient")


class Recording:
    """What the ranks have recorded, in bounded memory: the oldest rows go first.

    Times are nanoseconds of the notebook's monotonic clock. They are corrected when they are asked for: what is known
    of the ranks' clocks becomes better with time.

    Args:
        world_size: how many ranks there are.
        capacity: rows that are kept, by table of `records.TABLES`; 200 MB in all where nothing is said.
        clock: offsets of the ranks' clocks.

    Example:
        >>> recording = Recording(world_size=2)
        >>> loss = np.zeros(2, TABLES["metric"])
        >>> loss["name"], loss["step"], loss["value"] = 1, [0, 1], [0.5, 0.25]
        >>> recording.feed(Batch(rank=0, stream=1, texts={1: "loss"}, tables={"metric": loss}))
        >>> recording.metrics["loss"].values.tolist()
        [0.5, 0.25]
    """

    def __init__(
        self, world_size: int, *, capacity: Mapping[str, int] | None = None, clock: Clock | None = None
    ) -> None:
        self.world_size = world_size
        self.clock = clock or Clock()
        self.baseline: Mapping[str, Any] | None = None  # what one rank alone reached, once that was measured
        self.aside: set[int] = set()  # cells that are told of no more
        self.listeners: list[Callable[[Batch], None]] = []  # told of each batch that has come in, in the feeding thread
        self.catch_up: Callable[[], None] | None = None  # brings in what ranks have recorded and not sent yet
        self.store = Store(capacity)
        self._groups: dict[int, dict[str, Any]] = {}

    def __repr__(self) -> str:
        counts = {name: len(ring) for name, ring in self.store.rings.items()}
        words = {"call": "calls", "span": "spans", "metric": "values of metrics"}
        parts = [f"{counts[name]} {word}" for name, word in words.items()]
        if dropped := sum(self.store.dropped.values()):
            parts.append(f"{dropped} rows dropped")
        return f"<Recording of {self.world_size} rank{'s' * (self.world_size != 1)}: {', '.join(parts)}>"

    def feed(self, batch: Batch) -> None:
        """Take in what a rank has sent. Only one thread may do so."""
        self.store.feed(batch)
        for told in self.listeners:
            told(batch)

    def feed_dropped(self, batch: Batch) -> None:
        """Take in what is left of a batch whose rows had to be dropped: its texts, and how many rows those were."""
        self.store.learn(batch)

    # ---- questions

    @property
    def metrics(self) -> dict[str, Metric]:
        """What was logged, by name, in the order in which the names came first."""
        rows = self.rows("metric")
        numbers, firsts = np.unique(rows["name"], return_index=True)
        found = {}
        for number in numbers[np.argsort(firsts)].tolist():
            mine = rows[rows["name"] == number]
            found[self.text(number)] = Metric(
                name=self.text(number),
                ranks=mine["rank"],
                steps=mine["step"],
                values=mine["value"],
                times_ns=mine["time_ns"],
                cells=mine["cell"],
            )
        return found

    def collectives(
        self,
        op: str | None = None,
        group: str | None = None,
        rank: int | Sequence[int] | None = None,
        cell: int | None = None,
    ) -> Collectives:
        """Collectives, sends and receives, in the order in which they came in; each rank's in its own order.

        Args:
            op: as users call it: "all_reduce", "send".
            group: its title ("default") or torch's own name for it.
            rank: one rank or several.
            cell: number of a cell.

        Raises:
            UsageError: there is no such rank, or no such operation.
        """
        rows = self.rows("call")
        chosen = np.ones(len(rows), bool)
        if op is not None:
            number = self.store.texts.find(op)
            if number is None and op not in OPERATIONS:
                near = difflib.get_close_matches(op, OPERATIONS) or OPERATIONS
                raise UsageError(f"there is no operation {op!r}; there is {', '.join(near)}")
            chosen &= rows["op"] == number if number is not None else False
        if group is not None:
            numbers = [one for one in np.unique(rows["group"]).tolist() if self._is_group(one, group)]
            chosen &= np.isin(rows["group"], numbers)
        if rank is not None:
            chosen &= np.isin(rows["rank"], self._ranks(rank))
        if cell is not None:
            chosen &= rows["cell"] == cell
        return Collectives(self, rows if chosen.all() else rows[chosen])

    def steps(self, cell: int | None = None, rank: int | None = None) -> list[Step]:
        """What the time of each optimizer step went into, by rank."""
        from ddp_notebook.observe.steps import steps

        return steps.steps(self, cell, rank)

    def waits(self, cell: int | None = None, group: str | None = None) -> list[Wait]:
        """Who came when to each collective, and who waited for whom."""
        from ddp_notebook.observe.steps import waits

        return waits.waits(self, cell, group)

    def straggler(self, cell: int | None = None) -> Straggler | None:
        """The rank that the others wait for; None where the evidence is thin."""
        from ddp_notebook.observe.steps import waits

        return waits.straggler(self, cell)

    def bandwidth(self, cell: int | None = None) -> list[Bandwidth]:
        """Bytes per second of each operation at each size."""
        from ddp_notebook.observe.report import bandwidth

        return bandwidth.bandwidth(self, cell)

    def report(self, cell: int | None = None) -> Report:
        """A training cell in words, and what to try. `print` it."""
        from ddp_notebook.observe.report import report

        return report.report(self, cell)

    def gradients(self, name: str | None = None) -> list[Gradient]:
        """Gradients of the parameter that was chosen, before and after they were synchronised, by rank and backward.

        Args:
            name: of a parameter; all that were recorded where nothing is said.
        """
        rows = self.store.rings["value"].all()
        rows = rows[np.isin(rows["side"], (_LOCAL, _SYNCHRONISED))]
        if name is not None:
            number = self.store.texts.find(name)
            rows = rows[rows["name"] == number] if number is not None else rows[:0]
        sides: dict[tuple[int, int, int], dict[int, Preview]] = {}
        for row in rows:
            key = (int(row["rank"]), int(row["call"]), int(row["name"]))
            sides.setdefault(key, {})[int(row["side"])] = preview_of(self, row)
        spans = self.store.rings["span"].all()[["rank", "span", "cell", "step"]].tolist() if sides else []
        places = {(rank, span): (cell, step) for rank, span, cell, step in spans}
        return [
            Gradient(
                rank=rank,
                backward=backward,
                cell=places.get((rank, backward), (None, None))[0],
                step=places.get((rank, backward), (None, None))[1],
                parameter=self.text(parameter),
                local=of.get(_LOCAL),
                synchronised=of.get(_SYNCHRONISED),
            )
            for (rank, backward, parameter), of in sides.items()
        ]

    @property
    def resources(self) -> Rows:
        """(n,) memory and load, a row of `records.RESOURCE` for each rank and second."""
        return self.rows("resource")

    @property
    def layouts(self) -> list[Layout]:
        """How DDP models have their parameters in buckets, each time that has changed."""
        return [
            Layout(
                rank=int(row["rank"]),
                time_ns=int(row["time_ns"]),
                model=self.text(int(row["model"])),
                buckets=tuple(
                    BucketLayout(nbytes=one["nbytes"], parameters=tuple(one["parameters"]))
                    for one in self.store.texts.parsed(int(row["buckets"])) or ()
                ),
                is_rebuilt=bool(row["is_rebuilt"]),
            )
            for row in self.rows("layout")
        ]

    @property
    def dropped(self) -> dict[int, int]:
        """Rows that were dropped since the notebook could not keep up, by rank."""
        return {rank: count for rank, count in sorted(self.store.dropped.items()) if count}

    # ---- rows

    def rows(self, table: str, since: int = 0) -> Rows:
        """A copy of a table's rows, times on the notebook's clock. Ranks come as their batches came.

        Args:
            table: of `records.TABLES`.
            since: index of the first row; rows that are not kept any more are left out.
        """
        if self.catch_up is not None:
            self.catch_up()
        return self.follow(table, since)[0]

    def follow(self, table: str, index: int, most: int | None = None) -> tuple[Rows, int, int]:
        """What a reader has not seen yet: `(rows, the index to ask from next, rows that were lost to it)`.

        Args:
            table: of `records.TABLES`.
            index: where the reader is, from 0.
            most: rows; None: all.
        """
        if table not in TABLES:
            raise UsageError(f"there is no table {table!r}; the tables are {', '.join(TABLES)}")
        rows, end, lost = self.store.rings[table].since(index, most)
        if self.aside and "cell" in (TABLES[table].names or ()):
            rows = rows[~np.isin(rows["cell"], list(self.aside))]
        for rank in self.clock.shifted() if TIMES[table] else ():
            mine = np.flatnonzero(rows["rank"] == rank)
            for column in TIMES[table] if len(mine) else ():
                rows[column][mine] = self.clock.to_notebook(rank, rows[column][mine])
        return rows, end, lost

    def set_aside(self, cell: int) -> None:
        """Tell nothing more of a cell: it ran for a comparison only."""
        self.aside.add(cell)

    def text(self, number: int) -> str:
        """The text that a column of type `records.TEXT` means."""
        return self.store.texts[number]

    def group_of(self, number: int) -> dict[str, Any]:
        """The group that a text means: "name", "title" and "ranks"."""
        found = self._groups.get(number)
        if found is None:
            found = self._groups[number] = group_of(self.text(number))
        return found

    def shapes_of(self, number: int) -> tuple[tuple[int, ...], ...]:
        """The shapes that a text means."""
        return shapes_of(self.store.texts.parsed(number))

    def preview(self, rank: int, call: int, side: int) -> Preview | None:
        """What was in the tensors of a call; None where it was not recorded, or is not kept any more.

        Args:
            call: the rank's count of calls.
            side: index in `records.SIDES`: 0 the input, 1 the output.
        """
        row = self.store.find_values(rank, call, side)
        return None if row is None else preview_of(self, row)

    def tensor(self, rank: int, call: int, side: int) -> list[npt.NDArray[np.generic]]:
        """The whole tensors of a call, where `--tensors full` has kept them. Arguments as those of `preview`."""
        return self.store.whole(rank, call, side)

    def clock_error_ns(self, rank: int) -> int:
        """By how much the times of a rank may be off; 0 where nothing is known, as in files without a notebook."""
        return self.clock.error_ns(rank) or 0

    def to_pandas(self, table: str) -> Any:
        """A table as a DataFrame, texts and codes in words.

        Raises:
            MissingPackageError: pandas is not installed.
        """
        return frames.to_pandas(self, table, self.rows(table))

    # ---- pictures and files

    def plot_loss(self, name: str | None = None, cell: int | None = None) -> Figure:
        """A metric by step, a line for each rank; the one that looks like a loss where no name is given."""
        from ddp_notebook.observe.figures import figures

        return figures.loss(self, name=name, cell=cell)

    def plot_steps(self, cell: int | None = None) -> Figure:
        """What the time of the steps went into."""
        from ddp_notebook.observe.figures import figures

        return figures.steps(self, cell=cell)

    def plot_buckets(self, rank: int = 0, step: int | None = None, cell: int | None = None) -> Figure:
        """When the buckets of one step were synchronised, beside its backward."""
        from ddp_notebook.observe.figures import figures

        return figures.buckets(self, rank=rank, step=step, cell=cell)

    def plot_bandwidth(self, cell: int | None = None) -> Figure:
        """Bandwidth by message size."""
        from ddp_notebook.observe.figures import figures

        return figures.bandwidth(self, cell=cell)

    def save_trace(self, path: str | os.PathLike[str], cell: int | None = None) -> Path:
        """Write a trace for https://ui.perfetto.dev. Returns its path."""
        from ddp_notebook.observe.trace import trace

        return trace.save(self, path, cell=cell)

    def save_html(self, path: str | os.PathLike[str]) -> Path:
        """Write one page that shows it in any browser as the live monitor does, without a kernel or a network.

        It is complete, but for what a browser could not hold: of 64 ranks the last 130,000 rows of the timeline, some
        five minutes; the page says from where on it knows. It takes some hundred kilobytes, and 15 MB at most.

        Raises:
            MissingBuildError: the monitor's JavaScript was not built.
            UsageError: the folder is not there.
        """
        from ddp_notebook.widgets.still import page

        return page.save(self, path)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write all of it to one file, which `ddp_notebook.load` reads. Returns its path."""
        from ddp_notebook.observe import files

        return files.save(self, path)

    def _is_group(self, number: int, name: str) -> bool:
        found = self.group_of(number)
        return name in (found["title"], found["name"])

    def _ranks(self, rank: int | Sequence[int]) -> list[int]:
        ranks: list[int] = np.atleast_1d(rank).tolist()
        for one in ranks:
            if not 0 <= one < self.world_size:
                raise UsageError(f"there is no rank {one}; the ranks are 0 to {self.world_size - 1}")
        return ranks
