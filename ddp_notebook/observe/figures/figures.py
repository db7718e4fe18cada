"""Pictures of a recording: matplotlib figures that a notebook shows, whose titles say the result in words.

| picture | shows |
|---|---|
| `loss` | a metric by step, a line for each rank; above 16 ranks their range, median and the three furthest off |
| `steps` | what the time of a step goes into: by rank, and over the steps of the cell |
| `buckets` | when DDP's buckets of gradients were issued and when they were through, beside the backward of one step |
| `pipeline` | what each stage of a pipeline did with each microbatch, above what it would do if messages took no time |
| `bandwidth` | bus bandwidth by message size |
| `calls` | calls between ranks, one moment a line, and who has a reference to what |

Colours of times mean the same in all of them (`drawing.FILLS`): blue computes, orange-red is communication that
nothing hides, an outline waits for a slower rank. matplotlib is imported at the first picture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from ddp_notebook.errors import UsageError
from ddp_notebook.observe.remote import AutogradContext, Reference, RemoteCall
from ddp_notebook.observe.tables.matching import RowSource, in_cell, label_of
from ddp_notebook.observe.views import Metric, Pipeline

if TYPE_CHECKING:
    from ddp_notebook.observe.figures.drawing import Picture


class MetricsSource(RowSource, Protocol):
    """What is asked of a recording for the picture of a metric."""

    @property
    def metrics(self) -> Mapping[str, Metric]: ...


class CallsSource(RowSource, Protocol):
    """What is asked of a recording for the picture of its calls."""

    def calls(self, cell: int | None = None) -> Sequence[RemoteCall]: ...

    def references(self, cell: int | None = None) -> Sequence[Reference]: ...

    def contexts(self, cell: int | None = None) -> Sequence[AutogradContext]: ...


def loss(recording: MetricsSource, name: str | None = None, cell: int | None = None) -> Picture:
    """A metric by step.

    Args:
        recording: what the ranks have recorded.
        name: of the metric; None: the first one that has "loss" in its name, or else the first.
        cell: of this cell only; None: of all cells where their steps follow each other, or else of the last one.

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
    """What the time of a step goes into: the mean of each part by rank, and each step, mean of the ranks.

    Args:
        recording: what the ranks have recorded.
        cell: this cell; None: the last one with steps.

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
    """When the buckets of one step were issued and when they were through, beside the backward of that step.

    Args:
        recording: what the ranks have recorded.
        rank: whose.
        step: its number in the cell, from 0; None: the last one that has buckets.
        cell: this cell; None: the last one with buckets.

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
    """What each stage of a pipeline did with each microbatch, above the same without the time of messages.

    Numbers are those of microbatches. Of a rank that has several stages the later ones are paler.

    Args:
        recording: what the ranks have recorded.
        shown: one step of a schedule in it.

    Example:
        >>> from ddp_notebook.observe.recording import Recording
        >>> from ddp_notebook.observe.views import Action
        >>> one = Action(rank=0, stage=0, microbatch=0, kind="forward", start_ns=0, end_ns=10**6)
        >>> size = {"ranks": (0,), "stages": 1, "microbatches": 1, "even_bubble": 0.0}
        >>> shown = Pipeline(schedule="ScheduleGPipe", cell=1, step=0, actions=(one,), ideal=(one,), **size)
        >>> pipeline(Recording(1), shown).get_suptitle()
        'ScheduleGPipe with 1 stage and 1 microbatch: 0 % of 1.00 ms is bubble, 0 % if messages took no time (cell 1)'
    """
    from ddp_notebook.observe.figures import pipeline_figure

    return pipeline_figure.pipeline(shown, label_of(recording, shown.cell))


def bandwidth(recording: RowSource, cell: int | None = None) -> Picture:
    """Bus bandwidth by message size, on logarithmic axes: a line for each operation in each group.

    Args:
        recording: what the ranks have recorded.
        cell: of this cell only.

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
    """Calls between ranks: a column for each rank, an arrow for each call, and below who has a reference to what.

    Args:
        recording: what the ranks have recorded.
        cell: this cell; None: the last one with calls.
        most: calls that are drawn, the first ones.

    Raises:
        UsageError: no call was recorded.
    """
    from ddp_notebook.observe.figures import sequence

    found = [call for call in recording.calls(cell) if call.dst >= 0]  # else the callee is not known
    if not found:
        raise UsageError(f"no call to another rank was recorded{in_cell(recording, cell)}")
    last = max(call.cell for call in found)
    return sequence.draw(
        [call for call in found if call.cell == last], recording.references(last), recording.contexts(last), most
    )
