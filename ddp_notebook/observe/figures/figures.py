"""Figures of a recording: matplotlib figures that a notebook shows, with the result as their title.

| figure | shows |
|---|---|
| `loss` | a metric by step, one line per rank; above 16 ranks their range, median and the three outermost ranks |
| `steps` | breakdown of step times: by rank, and over the steps of the cell |
| `buckets` | issue and end of the DDP gradient buckets, together with the backward pass of one step |
| `pipeline` | actions of each pipeline stage on each microbatch, above the ideal schedule without message times |
| `bandwidth` | bus bandwidth by message size |
| `calls` | calls between ranks, one line per moment, and the remote references |

Colours have the same meaning in all of them (`drawing.FILLS`): blue is compute, orange-red is exposed communication, an
outline is waiting for a slower rank. matplotlib is imported with the first figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from ddp_notebook.errors import UsageError
from ddp_notebook.observe.remote import AutogradContext, Reference, RemoteCall
from ddp_notebook.observe.tables.matching import RowSource, in_cell
from ddp_notebook.observe.views import Metric, Pipeline

if TYPE_CHECKING:
    from ddp_notebook.observe.figures.drawing import Picture


class MetricsSource(RowSource, Protocol):
    """Part of a recording that the figure of a metric needs."""

    @property
    def metrics(self) -> Mapping[str, Metric]: ...


class CallsSource(RowSource, Protocol):
    """Part of a recording that the figure of calls needs."""

    def calls(self, cell: int | None = None) -> Sequence[RemoteCall]: ...

    def references(self, cell: int | None = None) -> Sequence[Reference]: ...

    def contexts(self, cell: int | None = None) -> Sequence[AutogradContext]: ...


def loss(recording: MetricsSource, name: str | None = None, cell: int | None = None) -> Picture:
    """Plot a metric by step.

    Args:
        recording: the recorded tables.
        name: name of the metric; None: the first one with "loss" in its name, else the first.
        cell: number of a cell; None: all cells if their steps continue, else the last one.

    Raises:
        UsageError: no such metric was recorded.

    Example:
        >>> from tests.observe.test_figures import logged
        >>> loss(logged({0: [2.0, 1.0], 1: [2.2, 1.2]})).get_suptitle()
        'loss falls from 2.1 to 1.1 in 2 steps; at the end the ranks are between 1 and 1.2'
    """
    from ddp_notebook.observe.figures import curves

    return curves.loss(recording, recording.metrics, name, cell)


def steps(recording: RowSource, cell: int | None = None) -> Picture:
    """Plot the breakdown of step times: the mean of each part by rank, and each step as the mean of the ranks.

    Args:
        recording: the recorded tables.
        cell: number of the cell; None: the last one with steps.

    Raises:
        UsageError: no step was recorded.

    Example:
        >>> from tests.observe.synthetic import simulate
        >>> steps(simulate(slow=2, phase="forward", extra_ms=50)).get_suptitle()
        'A step takes 84.5 ms: 50 % compute, 44 % waiting for rank 2'
    """
    from ddp_notebook.observe.figures import bars

    return bars.steps(recording, cell)


def buckets(recording: RowSource, rank: int = 0, step: int | None = None, cell: int | None = None) -> Picture:
    """Plot the issue and end of the buckets of one step, together with the backward pass of that step.

    Args:
        recording: the recorded tables.
        rank: number of the rank.
        step: its number in the cell, from 0; None: the last one with buckets.
        cell: number of the cell; None: the last one with buckets.

    Raises:
        UsageError: no such step was recorded, or it has no buckets.

    Example:
        >>> from tests.observe.synthetic import simulate
        >>> buckets(simulate()).get_suptitle()
        '75 % of the transfer of 4 buckets (4.2 MB) is hidden; exposed: 1.00 ms (rank 0, cell 1, step 19)'
    """
    from ddp_notebook.observe.figures import bars

    return bars.buckets(recording, rank, step, cell)


def pipeline(recording: RowSource, shown: Pipeline) -> Picture:
    """Plot the actions of each pipeline stage on each microbatch, above the ideal schedule without message times.

    Numbers are those of microbatches. If a rank has several stages, the later ones have a paler colour.

    Args:
        recording: the recorded tables.
        shown: one step of a schedule in the recording.

    Example:
        >>> from ddp_notebook.observe.recording import Recording
        >>> from ddp_notebook.observe.views import Action
        >>> one = Action(rank=0, stage=0, microbatch=0, kind="forward", start_ns=0, end_ns=10**6)
        >>> size = {"ranks": (0,), "stages": 1, "microbatches": 1, "even_bubble": 0.0}
        >>> shown = Pipeline(schedule="ScheduleGPipe", cell=1, step=0, actions=(one,), ideal=(one,), **size)
        >>> pipeline(Recording(1), shown).get_suptitle()
        'GPipe, 1 stage, 1 microbatch: bubble 0 %, 0 % if messages took no time'
    """
    from ddp_notebook.observe.figures import pipeline_figure

    return pipeline_figure.pipeline(shown)


def bandwidth(recording: RowSource, cell: int | None = None) -> Picture:
    """Plot bus bandwidth by message size, on logarithmic axes: a line for each operation in each group.

    Args:
        recording: the recorded tables.
        cell: number of a cell; None: all cells.

    Raises:
        UsageError: no transfer was recorded on at least two ranks.

    Example:
        >>> from tests.observe.synthetic import simulate
        >>> bandwidth(simulate(is_ddp=False, bucket_nbytes=1_000_000)).get_suptitle()
        'all_reduce reaches 1.5 GB/s of bus bandwidth at 4.0 MB'
    """
    from ddp_notebook.observe.figures import curves
    from ddp_notebook.observe.report.bandwidth import bandwidth as measure

    return curves.bandwidth(recording, measure(recording, cell), cell)


def calls(recording: CallsSource, cell: int | None = None, most: int = 12) -> Picture:
    """Plot calls between ranks: a column per rank, an arrow per call, and remote references below.

    Args:
        recording: the recorded tables.
        cell: number of the cell; None: the last one with calls.
        most: number of calls to draw, the first ones.

    Raises:
        UsageError: no call was recorded.
    """
    from ddp_notebook.observe.figures import sequence

    found = [call for call in recording.calls(cell) if call.dst >= 0]  # the callee of the others is unknown
    if not found:
        raise UsageError(f"no call to another rank was recorded{in_cell(recording, cell)}")
    last = max(call.cell for call in found)
    return sequence.draw(
        [call for call in found if call.cell == last], recording.references(last), recording.contexts(last), most
    )
