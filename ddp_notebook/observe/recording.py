"""What the ranks did: `session.recording`, or what `ddp_notebook.load` has read from files.

`Recording` offers users all that follows from the recorded tables, so it stands above the rest of `observe` and above
the page of `widgets/still`. These take `tables.recorded.RecordedTables`, and none of them imports this module.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ddp_notebook.errors import UsageError
from ddp_notebook.observe.tables.collectives import Collectives
from ddp_notebook.observe.tables.meanings import preview_of
from ddp_notebook.observe.tables.recorded import RecordedTables
from ddp_notebook.observe.views import BucketLayout, Gradient, Layout, Preview
from ddp_notebook.records.operation import OPERATIONS
from ddp_notebook.records.schema import SIDES, TABLES, Rows

if TYPE_CHECKING:
    import os
    from pathlib import Path

    from matplotlib.figure import Figure

    from ddp_notebook.observe.remote import AutogradContext, Reference, RemoteCall
    from ddp_notebook.observe.report.report import Report
    from ddp_notebook.observe.steps.run import TrainingRun
    from ddp_notebook.observe.views import Bandwidth, Pipeline, Step, Straggler, Wait

_LOCAL, _SYNCHRONISED = SIDES.index("local gradient"), SIDES.index("synchronised gradient")


class Recording(RecordedTables):
    """What the ranks have recorded, in bounded memory: the oldest rows go first.

    Times are nanoseconds of the notebook's monotonic clock. They are corrected each time they are asked for, because
    the offsets of the ranks' clocks are measured again and again.

    Args:
        world_size: how many ranks there are.
        capacity: rows that are kept, by table of `records.TABLES`; 200 MB in all where nothing is said.
        clock: offsets of the ranks' clocks.

    Example:
        >>> import numpy as np
        >>> from ddp_notebook.records.codec import Batch
        >>> from ddp_notebook.records.schema import TABLES
        >>> recording = Recording(world_size=2)
        >>> loss = np.zeros(2, TABLES["metric"])
        >>> loss["name"], loss["step"], loss["value"] = 1, [0, 1], [0.5, 0.25]
        >>> recording.feed(Batch(rank=0, stream=1, texts={1: "loss"}, tables={"metric": loss}))
        >>> recording.metrics["loss"].values.tolist()
        [0.5, 0.25]
    """

    def collectives(
        self,
        op: str | None = None,
        group: str | None = None,
        rank: int | Sequence[int] | None = None,
        cell: int | None = None,
        since: int = 0,
    ) -> Collectives:
        """Collectives, sends and receives, in the order in which they came in: each rank tells of them as they end.

        Args:
            op: as users call it: "all_reduce", "send".
            group: its title ("default") or torch's own name for it.
            rank: one rank or several.
            cell: number of a cell.
            since: index of the first row, as for `rows`.

        Raises:
            UsageError: there is no such rank, or no such operation.

        Example:
            >>> from ddp_notebook.widgets import simulate
            >>> simulate(world_size=2).collectives(op="send", rank=0)
            <Collectives: 4 calls of rank 0: 4 send>
        """
        rows = self.rows("call", since)
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
        """What the time of each optimizer step went into, by rank.

        Args:
            cell: number of a cell; None: all.
            rank: this one only; None: all.

        Example:
            >>> from ddp_notebook.widgets import simulate
            >>> step = simulate(world_size=2).steps(cell=1, rank=0)[10]
            >>> step.compute_ns + step.exposed_ns + step.waiting_ns < step.duration_ns, len(step.buckets)
            (True, 6)
        """
        from ddp_notebook.observe.steps import steps

        return steps.steps(self, cell, rank)

    def runs(self) -> list[TrainingRun]:
        """Return the training runs, by cell: label, steps and ms/step with its definition, as all displays show them.

        Example:
            >>> from ddp_notebook.widgets import simulate
            >>> [(run.label, run.steps, run.per_step) for run in simulate(world_size=4).runs()]
            [('cell 1', 60, '39.0 ms/step'), ('cell 2', 60, '46.5 ms/step')]
        """
        from ddp_notebook.observe.steps import run

        return run.runs(self)

    def waits(self, cell: int | None = None, group: str | None = None) -> list[Wait]:
        """When each rank came to each collective, and how long it waited for the last one.

        Args:
            cell: number of a cell; None: all.
            group: its title ("default") or torch's own name for it; None: all.
        """
        from ddp_notebook.observe.steps import waits

        return waits.waits(self, cell, group)

    def straggler(self, cell: int | None = None) -> Straggler | None:
        """The rank that the others wait for; None where the evidence is thin.

        Args:
            cell: number of a cell; None: the last one with steps.

        Example:
            >>> from ddp_notebook.widgets import simulate
            >>> simulate(world_size=4, straggler=2).straggler().rank
            2
        """
        from ddp_notebook.observe.steps import waits

        return waits.straggler(self, cell)

    def pipeline(self, cell: int | None = None, step: int | None = None, rank: int | None = None) -> Pipeline:
        """One step of a pipeline of `torch.distributed.pipelining`: each action, and what the schedule itself would be.

        Args:
            cell: number of a cell; None: the last one with a pipeline.
            step: of the schedule, from 0 in its cell; None: one of typical length.
            rank: of the pipeline that this rank has a stage of; None: of the last one.

        Raises:
            UsageError: no such step was recorded.
        """
        from ddp_notebook.observe.steps import pipelines

        return pipelines.pipeline(self, cell, step, rank)

    def bandwidth(self, cell: int | None = None) -> list[Bandwidth]:
        """Bytes per second of each operation at each message size, as nccl-tests counts them.

        Args:
            cell: number of a cell; None: all.
        """
        from ddp_notebook.observe.report import bandwidth

        return bandwidth.bandwidth(self, cell)

    def report(self, cell: int | None = None) -> Report:
        """A training cell in words, and what to try. `print` it.

        Args:
            cell: number of a cell; None: the last one with steps.
        """
        from ddp_notebook.observe.report import report

        return report.report(self, cell)

    def calls(self, cell: int | None = None, since: int = 0) -> list[RemoteCall]:
        """Calls to other ranks by `torch.distributed.rpc`, and fetches of remote references, by the time at which they
        were made. One that has not returned is open (`is_open`), without the times that are not known yet; its rank
        tells of it when it has taken a second or so.

        Args:
            cell: number of a cell; None: all.
            since: index of the first row, as for `rows`.

        Example:
            >>> [(call.function, call.src, call.dst) for call in session.recording.calls()]  # doctest: +SKIP
            [('select_action', 1, 0), ('select_action', 1, 0), ('observe', 0, 1)]
        """
        from ddp_notebook.observe.tables import remote

        return remote.calls(self, cell, self.rows("rpc", since))

    def references(self, cell: int | None = None) -> list[Reference]:
        """Remote references, by the time at which they were made: who owns the value, who has had one.

        Args:
            cell: number of the cell that has made them; None: all.
        """
        from ddp_notebook.observe.tables import remote

        return remote.references(self, cell)

    def contexts(self, cell: int | None = None) -> list[AutogradContext]:
        """Contexts of distributed autograd: which messages a backward has gone through, and steps of optimizers.

        Args:
            cell: number of a cell; None: all.
        """
        from ddp_notebook.observe.tables import remote

        return remote.contexts(self, cell)

    def gradients(self, name: str | None = None) -> list[Gradient]:
        """Gradients of the parameter that was chosen, before and after they were synchronised, by rank and backward.

        Args:
            name: of a parameter; None: all that were recorded.
        """
        rows = self.store.rings["value"].all()
        rows = rows[np.isin(rows["side"], (_LOCAL, _SYNCHRONISED))]
        if name is not None:
            number = self.store.texts.find(name)
            rows = rows[rows["name"] == number] if number is not None else rows[:0]
        sides: dict[tuple[int, int, int], dict[int, Preview]] = {}
        for row in rows:
            key = (int(row["rank"]), int(row["call"]), int(row["name"]))
            sides.setdefault(key, {})[int(row["side"])] = preview_of(row, self.text)
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

    def to_pandas(self, table: str = "step") -> Any:
        """A table as a DataFrame, texts and codes in words.

        Args:
            table: "run", the training runs as all displays show them; "step", what the time of their steps went into;
                or of `records.TABLES`: "call", "value", "span", "metric", "resource", "layout", "loader", "rpc",
                "reference" or "context".

        Raises:
            MissingPackageError: pandas is not installed.
            UsageError: there is no such table.
        """
        from ddp_notebook.observe.tables import frames

        if table == "run":
            return frames.of_runs(self)
        if table == "step":
            return frames.of_steps(self)
        if table not in TABLES:
            raise UsageError(f"unknown table {table!r}; the tables are run, step, {', '.join(TABLES)}")
        return frames.to_pandas(self, table, self.rows(table))

    # ---- figures and files

    @property
    def plot(self) -> Plots:
        """Figures of the recording: `plot.loss()`, `plot.steps()`, `plot.buckets()` and others.

        Example:
            >>> from ddp_notebook.widgets import simulate
            >>> simulate(world_size=2).plot.loss()
            <Picture ...>
        """
        return Plots(self)

    def save_trace(self, path: str | os.PathLike[str], cell: int | None = None) -> Path:
        """Write a trace for https://ui.perfetto.dev. Returns its path.

        Args:
            path: of the file; compressed where it ends in ".gz".
            cell: number of a cell; None: all.

        Raises:
            UsageError: nothing was recorded, or the folder is not there.
        """
        from ddp_notebook.observe.trace import trace

        return trace.save(self, path, cell=cell)

    def save_html(self, path: str | os.PathLike[str]) -> Path:
        """Write one page that shows it in any browser as the live monitor does, without a kernel or a network.

        The page holds the newest rows that a browser has room for: with 64 ranks 130,000 rows of the timeline, about
        five minutes; it says from what time on it is complete. It takes some hundred kilobytes, and 15 MB at most.

        Raises:
            MissingBuildError: the monitor's JavaScript was not built.
            UsageError: the folder is not there.
        """
        from ddp_notebook.widgets.still import saved_page

        return saved_page.save(self, path)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write all of it to one file, which `ddp_notebook.load` reads. Returns its path.

        Raises:
            UsageError: the folder is not there.
        """
        from ddp_notebook.observe.tables import saved

        return saved.save(self, path)

    def _is_group(self, number: int, name: str) -> bool:
        found = self.group_of(number)
        return name in (found["title"], found["name"])

    def _ranks(self, rank: int | Sequence[int]) -> list[int]:
        ranks: list[int] = np.atleast_1d(rank).tolist()
        for one in ranks:
            if not 0 <= one < self.world_size:
                raise UsageError(f"there is no rank {one}; the ranks are 0 to {self.world_size - 1}")
        return ranks


class Plots:
    """Figures of a recording, drawn with matplotlib.

    Args:
        recording: the recorded tables.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    def loss(self, name: str | None = None, cell: int | None = None) -> Figure:
        """A metric by step, a line for each rank.

        Args:
            name: of the metric; None: the one that looks like a loss, or else the first.
            cell: number of a cell; None: all.
        """
        from ddp_notebook.observe.figures import figures

        return figures.loss(self._recording, name=name, cell=cell)

    def steps(self, cell: int | None = None) -> Figure:
        """What the time of the steps went into, by rank or by step.

        Args:
            cell: number of a cell; None: the last one with steps.
        """
        from ddp_notebook.observe.figures import figures

        return figures.steps(self._recording, cell=cell)

    def buckets(self, rank: int = 0, step: int | None = None, cell: int | None = None) -> Figure:
        """When the buckets of one step were synchronised, beside its backward.

        Args:
            rank: whose step.
            step: its number in its cell, from 0; None: a typical one.
            cell: number of a cell; None: the last one with steps.
        """
        from ddp_notebook.observe.figures import figures

        return figures.buckets(self._recording, rank=rank, step=step, cell=cell)

    def pipeline(self, cell: int | None = None, step: int | None = None, rank: int | None = None) -> Figure:
        """What each stage did with each microbatch, above the same if messages took no time.

        Arguments as those of `pipeline`.
        """
        from ddp_notebook.observe.figures import figures

        return figures.pipeline(self._recording, self._recording.pipeline(cell, step, rank))

    def bandwidth(self, cell: int | None = None) -> Figure:
        """Bus bandwidth of each operation by message size.

        Args:
            cell: number of a cell; None: all.
        """
        from ddp_notebook.observe.figures import figures

        return figures.bandwidth(self._recording, cell=cell)

    def calls(self, cell: int | None = None, most: int = 12) -> Figure:
        """Calls between ranks: a column for each rank, an arrow for each call, and below who has a reference to what.

        Args:
            cell: number of a cell; None: the last one with calls.
            most: calls that are drawn, the first ones; the title says how many there were.

        Raises:
            UsageError: no call was recorded.
        """
        from ddp_notebook.observe.figures import figures

        return figures.calls(self._recording, cell, most)
