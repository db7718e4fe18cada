"""The recording of the ranks: `session.recording`, or the result of `ddp_notebook.load`.

`Recording` offers users all analyses of the recorded tables, so it imports the rest of `observe` and the page of
`widgets/still`. These use `tables.recorded.RecordedTables`, and none of them imports this module.
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

    from ddp_notebook.observe.compare.comparison import Comparison
    from ddp_notebook.observe.forecast.forecast import Forecast
    from ddp_notebook.observe.nan.first_nan import FirstNan
    from ddp_notebook.observe.remote import AutogradContext, Reference, RemoteCall
    from ddp_notebook.observe.report.report import Report
    from ddp_notebook.observe.steps.run import TrainingRun
    from ddp_notebook.observe.views import Bandwidth, Pipeline, Step, Straggler, Wait

_LOCAL, _SYNCHRONISED = SIDES.index("local gradient"), SIDES.index("synchronised gradient")


class Recording(RecordedTables):
    """Everything that the ranks have recorded, in bounded memory: the oldest rows are dropped first.

    Times are nanoseconds of the notebook's monotonic clock. They are converted at each query, because the clock offsets
    are measured repeatedly.

    Args:
        world_size: number of ranks.
        capacity: number of kept rows, by table of `records.TABLES`; by default 200 MB in total.
        clock: offsets of the ranks' clocks.

    Example:
        >>> import numpy as np
        >>> from ddp_notebook.records.codec import Batch
        >>> from ddp_notebook.records.schema import TABLES
        >>> recording = Recording(world_size=2)
        >>> loss = np.zeros(2, TABLES["metric"])
        >>> loss["name"], loss["step"], loss["value"] = 1, [0, 1], [0.5, 0.25]
        >>> recording._feed(Batch(rank=0, stream=1, texts={1: "loss"}, tables={"metric": loss}))
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
        """Return collectives, sends and receives, in the order of arrival. Ranks send them after their end.

        Args:
            op: name of the operation as users call it: "all_reduce", "send".
            group: its title ("default") or its name in torch.
            rank: one rank or several.
            cell: number of a cell.
            since: index of the first row, as for `rows`.

        Raises:
            UsageError: the rank or the operation does not exist.

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
                raise UsageError(f"op must be an operation such as {', '.join(near)}, got {op!r}")
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
        """Return the breakdown of the time of each optimizer step, by rank.

        Args:
            cell: number of a cell; None: all cells.
            rank: number of a rank; None: all ranks.

        Example:
            >>> from ddp_notebook.widgets import simulate
            >>> step = simulate(world_size=2).steps(cell=1, rank=0)[10]
            >>> step.compute_ns + step.exposed_ns + step.waiting_ns < step.duration_ns, len(step.buckets)
            (True, 6)
        """
        from ddp_notebook.observe.steps import steps

        return steps.steps(self, cell, rank)

    def runs(self) -> list[TrainingRun]:
        """Return the training runs, by cell: label, steps, and ms/step with its definition, as shown everywhere.

        Example:
            >>> from ddp_notebook.widgets import simulate
            >>> [(run.label, run.steps, run.per_step) for run in simulate(world_size=4).runs()]
            [('cell 1', 60, '39.0 ms/step'), ('cell 2', 60, '46.5 ms/step')]
        """
        from ddp_notebook.observe.steps import run

        return run.runs(self)

    def waits(self, cell: int | None = None, group: str | None = None) -> list[Wait]:
        """Return the arrival times of each rank at each collective, and the time that it waited for the last rank.

        Args:
            cell: number of a cell; None: all cells.
            group: its title ("default") or its name in torch; None: all groups.
        """
        from ddp_notebook.observe.steps import waits

        return waits.waits(self, cell, group)

    def straggler(self, cell: int | None = None) -> Straggler | None:
        """Return the rank that the others wait for, or None if the evidence is insufficient.

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
        """Return one step of a `torch.distributed.pipelining` schedule: all actions, and the ideal schedule.

        Args:
            cell: number of a cell; None: the last one with a pipeline.
            step: number of the schedule's step in its cell, from 0; None: a step of typical length.
            rank: select the pipeline in which this rank has a stage; None: the last pipeline.

        Raises:
            UsageError: no such step was recorded.
        """
        from ddp_notebook.observe.steps import pipelines

        return pipelines.pipeline(self, cell, step, rank)

    def bandwidth(self, cell: int | None = None) -> list[Bandwidth]:
        """Return the bytes per second of each operation at each message size, as defined by nccl-tests.

        Args:
            cell: number of a cell; None: all cells.
        """
        from ddp_notebook.observe.report import bandwidth

        return bandwidth.bandwidth(self, cell)

    def report(self, cell: int | None = None) -> Report:
        """Return a report on a training cell, with advice. `print` shows it.

        Args:
            cell: number of a cell; None: the last one with steps, or that ran a pipeline, remote calls or inference
                without an optimizer.
        """
        from ddp_notebook.observe.report import report

        return report.report(self, cell)

    def forecast(
        self,
        ranks: Sequence[int],
        *,
        cell: int | None = None,
        gpus_per_node: int | None = None,
        network: float | Sequence[float] | None = None,
        latency_us: float | Sequence[float] | None = None,
        bucket_mb: float | None = None,
        batch: float = 1.0,
        micro_steps: int | None = None,
    ) -> Forecast:
        """Predict the step time of DDP on other numbers of ranks. `print` shows it, and `plot` draws it.

        First the recorded run itself is predicted. If that is off by more than 10 %, `predictions` is empty.

        Args:
            ranks: numbers of ranks to predict.
            cell: number of a cell; None: the last one with steps.
            gpus_per_node: ranks of a node; None: all ranks are equally far from each other.
            network: GB/s that each rank can send, one value, or one inside and one between nodes; None: the rate that
                explains the recorded transfers best.
            latency_us: microseconds of a message, as `network`.
            bucket_mb: size of DDP's gradient buckets in MiB, as `bucket_cap_mb` of DDP; None: as recorded.
            batch: batch of each rank, as a multiple of the recorded one. Input, forward and backward take as many times
                as long.
            micro_steps: forward and backward passes of a step, of which the last one synchronises gradients; None: as
                recorded.

        Raises:
            UsageError: a value is out of range, or the cell has not trained with DDP on all ranks.

        Example:
            >>> from ddp_notebook.widgets import simulate
            >>> found = simulate(world_size=4).forecast([8, 64], network=10)
            >>> [(one.ranks, round(one.step_ns / 1e6)) for one in found.predictions], abs(found.error) < 0.1
            ([(8, 45), (64, 45)], True)
        """
        from ddp_notebook.observe.forecast import forecast

        return forecast.forecast(
            self,
            ranks,
            cell=cell,
            gpus_per_node=gpus_per_node,
            network=network,
            latency_us=latency_us,
            bucket_mb=bucket_mb,
            batch=batch,
            micro_steps=micro_steps,
        )

    def compare(
        self,
        other: Recording | None = None,
        cell: int | None = None,
        other_cell: int | None = None,
    ) -> Comparison:
        """Compare a training run of this recording (A) with one of another recording (B). `print` shows the result.

        Changes of times, collectives, memory and numbers are reported if they exceed the noise, which is the variation
        within each of the two runs.

        Args:
            other: another recording, such as `ddp_notebook.load("run.npz")`; None: this recording.
            cell: number of the cell in this recording; None: the last one with steps, or the one before it if `other`
                is None.
            other_cell: number of the cell in the other recording; None: the last one with steps.

        Raises:
            UsageError: there is no such training run.

        Example:
            >>> from ddp_notebook.widgets import simulate
            >>> print(simulate(world_size=4).compare().time.cause)
            the forward of rank 2 takes 18... ms instead of 10... ms
        """
        from ddp_notebook.observe.compare import comparison

        return comparison.compare_with(self, other, cell, other_cell)

    def first_nan(self, cell: int | None = None) -> FirstNan:
        """Return where the values of a training run stopped being finite. `print` shows it.

        It reads the recorded gradients of each rank before they were averaged, and the logged numbers. If the values of
        some steps were not recorded, the answer is an interval of steps.

        Args:
            cell: number of a cell; None: the last one with training steps or logged numbers.

        Raises:
            UsageError: nothing of such a cell was recorded.

        Example:
            >>> from ddp_notebook.widgets import simulate
            >>> simulate(world_size=2).first_nan().is_found
            False
        """
        from ddp_notebook.observe.nan import first_nan

        self.rows("layout")  # request rows that ranks have not sent yet
        return first_nan.first_nan(self, cell)

    def calls(self, cell: int | None = None, since: int = 0) -> list[RemoteCall]:
        """Return RPC calls to other ranks and fetches of remote references, in the order of their start.

        A call that has not returned is open (`is_open`), and lacks the times that are not known yet. Its rank reports
        it after about a second.

        Args:
            cell: number of a cell; None: all cells.
            since: index of the first row, as for `rows`.

        Example:
            >>> [(call.function, call.src, call.dst) for call in session.recording.calls()]  # doctest: +SKIP
            [('select_action', 1, 0), ('select_action', 1, 0), ('observe', 0, 1)]
        """
        from ddp_notebook.observe.tables import rpc_rows

        return rpc_rows.calls(self, cell, self.rows("rpc", since))

    def references(self, cell: int | None = None) -> list[Reference]:
        """Return remote references in the order of their creation, with the owner of the value and its users.

        Args:
            cell: number of the cell that has created them; None: all cells.
        """
        from ddp_notebook.observe.tables import rpc_rows

        return rpc_rows.references(self, cell)

    def contexts(self, cell: int | None = None) -> list[AutogradContext]:
        """Return distributed autograd contexts, with the messages of their backward pass and the optimizer steps.

        Args:
            cell: number of a cell; None: all cells.
        """
        from ddp_notebook.observe.tables import rpc_rows

        return rpc_rows.contexts(self, cell)

    def gradients(self, name: str | None = None) -> list[Gradient]:
        """Return the gradients of the watched parameter, before and after synchronisation, by rank and backward pass.

        Args:
            name: name of a parameter; None: all recorded parameters.
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
        """Assignments of DDP parameters to buckets, one for each change."""
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
        """Return a table as a DataFrame, with texts in place of numbers and codes.

        Args:
            table: "run": training runs as shown everywhere. "step": breakdown of step times. Or one of
                `records.TABLES`: "call", "value", "span", "metric", "resource", "layout", "loader",
                "indices", "rpc", "reference", "context".

        Raises:
            MissingPackageError: pandas is not installed.
            UsageError: the table does not exist.
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
        """Write a trace for https://ui.perfetto.dev, and return its path.

        Args:
            path: path of the file; compressed if it ends in ".gz".
            cell: number of a cell; None: all cells.

        Raises:
            UsageError: nothing was recorded, or the folder does not exist.
        """
        from ddp_notebook.observe.trace import trace

        return trace.save(self, path, cell=cell)

    def save_html(self, path: str | os.PathLike[str]) -> Path:
        """Write one page that shows the recording like the live monitor, in any browser without a kernel or a network.

        The page contains the newest rows, up to the limit of a browser: with 64 ranks 130,000 rows of the timeline,
        about five minutes. It shows the time from which it is complete. Its size is some hundred kilobytes, at most 15
        MB.

        Raises:
            MissingBuildError: the monitor's JavaScript was not built.
            UsageError: the folder does not exist.
        """
        from ddp_notebook.widgets.still import saved_page

        return saved_page.save(self, path)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the recording to one file, which `ddp_notebook.load` reads. Return its path.

        Raises:
            UsageError: the folder does not exist.
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
                raise UsageError(f"rank {one} does not exist; the ranks are 0 to {self.world_size - 1}")
        return ranks


class Plots:
    """Figures of a recording, drawn with matplotlib.

    Args:
        recording: the recorded tables.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    def loss(self, name: str | None = None, cell: int | None = None) -> Figure:
        """Plot a metric by step, one line per rank.

        Args:
            name: name of the metric; None: the first one whose name looks like a loss, else the first.
            cell: number of a cell; None: all cells.
        """
        from ddp_notebook.observe.figures import figures

        return figures.loss(self._recording, name=name, cell=cell)

    def steps(self, cell: int | None = None) -> Figure:
        """Plot the breakdown of step times, by rank or by step.

        Args:
            cell: number of a cell; None: the last one with steps.
        """
        from ddp_notebook.observe.figures import figures

        return figures.steps(self._recording, cell=cell)

    def buckets(self, rank: int = 0, step: int | None = None, cell: int | None = None) -> Figure:
        """Plot the synchronisation of the buckets in one step, together with its backward pass.

        Args:
            rank: number of the rank.
            step: number of the step in its cell, from 0; None: a typical one.
            cell: number of a cell; None: the last one with steps.
        """
        from ddp_notebook.observe.figures import figures

        return figures.buckets(self._recording, rank=rank, step=step, cell=cell)

    def pipeline(self, cell: int | None = None, step: int | None = None, rank: int | None = None) -> Figure:
        """Plot the actions of each stage on each microbatch, above the ideal schedule without message times.

        The arguments are those of `Recording.pipeline`.
        """
        from ddp_notebook.observe.figures import figures

        return figures.pipeline(self._recording, self._recording.pipeline(cell, step, rank))

    def bandwidth(self, cell: int | None = None) -> Figure:
        """Plot the bus bandwidth of each operation by message size.

        Args:
            cell: number of a cell; None: all cells.
        """
        from ddp_notebook.observe.figures import figures

        return figures.bandwidth(self._recording, cell=cell)

    def calls(self, cell: int | None = None, most: int = 12) -> Figure:
        """Plot calls between ranks: a column per rank, an arrow per call, and remote references below.

        Args:
            cell: number of a cell; None: the last one with calls.
            most: number of calls to draw, the first ones; the title has the total number.

        Raises:
            UsageError: no call was recorded.
        """
        from ddp_notebook.observe.figures import figures

        return figures.calls(self._recording, cell, most)
