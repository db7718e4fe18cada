"""Static output of a live view in a saved notebook: one line of text with the result, and a picture."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ddp_notebook.observe.steps.run import TrainingRun, run_of
from ddp_notebook.observe.steps.steps import StepTable, measure
from ddp_notebook.observe.steps.waits import straggler_of
from ddp_notebook.observe.tables.matching import RowSource, label_of
from ddp_notebook.observe.tables.parts import RecordingPart
from ddp_notebook.observe.tables.recorded import RecordedTables
from ddp_notebook.observe.tables.rpc_rows import latest
from ddp_notebook.observe.views import Metric, Straggler, main_metric
from ddp_notebook.records.names import readable
from ddp_notebook.records.schema import RPC_KINDS, RPC_SIDES, SPANS, Rows
from ddp_notebook.records.units import three_figures, two_figures
from ddp_notebook.records.words import rank_on
from ddp_notebook.widgets.feed.courses import MOST_NAMES

if TYPE_CHECKING:
    from ddp_notebook.observe.figures.drawing import Picture

_MOST_MEASURED = 8_000  # last steps to measure, of all ranks together
_MOST_DRAWN = 3000  # last steps to draw, of all ranks together
_MOST_COLUMNS = 100
_MOST_LINES = 8
_HEIGHT = 3.1  # inches
_TITLE_LETTERS = 95  # most characters in a line of the title
_MOST_TITLE_LINES = 4  # a longer title would cover the axes
_DPI = 144
_LETTER = 0.0085  # width of a character at the end of a line, relative to the picture
_COLOURS = 128  # colours of the picture; reduces its size to a third


def text(recording: RecordedTables, cell: int | None = None) -> str:
    """Return the result in one line. Each part appears only if the recording has it.

    Args:
        recording: Recording of the ranks.
        cell: Cell to describe; None for the last training run, or for the whole recording if there was no training.

    Example:
        >>> from ddp_notebook.widgets import simulate
        >>> text(simulate(world_size=4), cell=2)
        'cell 2: 4 ranks, 60 steps, loss 0.205 -> 0.107, 46.5 ms/step, 9.6 % exposed communication, rank 2 slowest'
    """
    return _Facts.of(recording, cell).words()


def picture(recording: RecordedTables, cell: int | None = None) -> bytes:
    """Return a PNG with the loss of each rank and the parts of its step times, readable on light and dark pages.

    Takes the arguments of `text`. That text is the picture's title, and its description for screen readers.
    """
    return _picture(_Facts.of(recording, cell))


def text_and_picture(recording: RecordedTables, cell: int | None = None) -> tuple[str, Callable[[], bytes]]:
    """Return the text, and a function that draws the picture of the same rows. The next prompt is delayed by both."""
    facts = _Facts.of(recording, cell)
    return facts.words(), lambda: _picture(facts)


def _picture(facts: _Facts) -> bytes:
    drawn = _draw(facts)
    data = io.BytesIO()
    about = {"Title": "ddp_notebook", "Description": facts.words(), "Software": "ddp_notebook"}
    drawn.savefig(data, format="png", dpi=_DPI)
    return _small(data, about)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Facts:
    """Content of the text and the picture."""

    world_size: int
    hosts: tuple[str, ...]
    cell: int | None
    label: str  # label of the chosen cell, or of the newest run; "" if all cells are shown
    run: TrainingRun | None
    metric: Metric | None
    metrics: int  # number of names in the cell, or in all cells
    measured: StepTable  # the last steps
    straggler: Straggler | None
    calls: int
    remote_calls: int
    dropped: int

    @classmethod
    def of(cls, recording: RecordedTables, cell: int | None) -> _Facts:
        run = run_of(recording, cell)
        cell = cell if run is None else run.cell
        spans, calls, remote = recording.rows("span"), recording.rows("call"), latest(recording.rows("rpc"))
        ends_ns = spans["end_ns"][_in(spans, cell) & (spans["kind"] == SPANS.index("optimizer"))]
        remote = remote[(remote["side"] == RPC_SIDES.index("caller")) & (remote["kind"] != RPC_KINDS.index("torch"))]
        source: RowSource = recording
        if len(ends_ns) > _MOST_MEASURED:
            source = _Since(recording, int(np.partition(ends_ns, -_MOST_MEASURED)[-_MOST_MEASURED]))
        found = measure(source, cell)
        metrics = recording._metrics_of(cell)
        metric = _metric(metrics)
        label = "" if cell is None else label_of(recording, cell)
        is_all = metric is not None and metrics[metric.name].is_continued and len(np.unique(metric.cells)) > 1
        if metric is not None and cell is None and not is_all:
            label = label_of(recording, int(metric.cells.max()))
        return cls(
            world_size=recording.world_size,
            hosts=recording.hosts,
            cell=cell,
            label=label,
            run=run,
            metric=metric,
            metrics=len(metrics),
            measured=found,
            straggler=straggler_of(found, recording.hosts),
            calls=int(np.count_nonzero(_in(calls, cell))),
            remote_calls=int(np.count_nonzero(_in(remote, cell))),
            dropped=sum(recording.dropped.values()),
        )

    def words(self) -> str:
        count = self.world_size if self.run is None else self.run.ranks
        parts = [f"{count} rank{'s' * (count != 1)}"]
        if self.run is not None:
            parts.append(self.run.counted)
        parts += _course(self.metric)
        if self.metrics > MOST_NAMES:
            parts[-1] += f" (one of {self.metrics:,} metrics)"
        if self.run is not None:
            parts.append(self.run.per_step)
            steps = self.measured.settled.typical
            exposed = float(steps.parts["exposed"].sum()) / max(float(steps.duration_ns.sum()), 1.0)
            if self.world_size > 1 and steps.parts["communication"].any():
                parts.append(f"{two_figures(100 * exposed)} % exposed communication")
        elif self.calls:
            parts.append(f"{self.calls:,} communication call{'s' * (self.calls != 1)}")
        if self.remote_calls:
            parts.append(f"{self.remote_calls:,} remote call{'s' * (self.remote_calls != 1)}")
        if self.straggler is not None:
            parts.append(f"{rank_on(self.straggler.rank, self.hosts)} slowest")
        if len(parts) == 1:
            parts.append("nothing recorded")
        if self.dropped:
            parts.append(f"{self.dropped:,} rows lost")
        return (f"{self.label}: " if self.label else "") + ", ".join(parts)


def _in(rows: Rows, cell: int | None) -> npt.NDArray[np.bool_]:
    """Return (n,) flags of the rows of a cell; None selects all rows."""
    return np.ones(len(rows), bool) if cell is None else rows["cell"] == cell


class _Since(RecordingPart):
    """The last part of a recording, from a given time on."""

    def __init__(self, recording: RowSource, begin_ns: int) -> None:
        super().__init__(recording)
        self._begin_ns = begin_ns

    def rows(self, table: str) -> Rows:
        rows = super().rows(table)
        column = {"span": "start_ns", "call": "issue_ns"}.get(table)
        return rows if column is None else rows[rows[column] >= self._begin_ns]


# ---- the metric


def _metric(metrics: Mapping[str, Metric]) -> Metric | None:
    """Return the metric to show. If its steps do not continue from cell to cell, only its last cells are included."""
    if not metrics:
        return None
    metric = metrics[main_metric(metrics)]
    if metric.is_continued:
        return metric
    mine = np.isin(metric.cells, metric.runs[-1])
    columns = ("ranks", "steps", "values", "times_ns", "cells", "is_given", "units")
    return Metric(name=metric.name, **{name: getattr(metric, name)[mine] for name in columns})


def _course(metric: Metric | None) -> list[str]:
    """Return a text with the first and the last value, as means of the ranks."""
    if metric is None:
        return []
    name = readable(metric.name)
    wrong = ~np.isfinite(metric.values)
    if wrong.any():
        first = int(metric.steps[wrong].min())
        value = metric.values[wrong & (metric.steps == first)][0]
        return [f"{name} {value:g} from {metric.unit_of()} {first}"]
    ranks, firsts = np.unique(metric.ranks, return_index=True)
    _, lasts = np.unique(metric.ranks[::-1], return_index=True)
    begin, end = float(metric.values[firsts].mean()), float(metric.values[::-1][lasts].mean())
    is_single = len(metric.values) == len(ranks)
    return [f"{name} {three_figures(end)}" if is_single else f"{name} {three_figures(begin)} -> {three_figures(end)}"]


# ---- the picture


def _draw(facts: _Facts) -> Picture:
    from ddp_notebook.observe.figures import bars, curves
    from ddp_notebook.observe.figures.drawing import key, label_ends, picture

    last = facts.measured.number.max(initial=0) - _MOST_DRAWN // max(len(facts.measured.ranks), 1)
    steps = replace(facts.measured[facts.measured.number > last], calls=()).steps()  # buckets are not drawn
    before = _steps_before(facts)  # a bar has the same step number as the value logged in that step
    numbers = [step.step + (before or 0) for step in steps]
    has_steps = len(set(numbers)) > 1
    columns = [1.0] * ((facts.metric is not None) + has_steps)
    height = _HEIGHT if columns else 0.4  # only a line of text
    figure, found = picture(facts.words(), height, columns=columns or [1.0], layout=None, title_pt=10)
    if not columns:
        found[0].remove()
        return figure
    in_title = min(-(-len(facts.words()) // _TITLE_LETTERS), _MOST_TITLE_LINES)  # lines
    figure.subplots_adjust(
        left=0.09, right=0.985, top=0.94 - 0.06 * in_title, bottom=0.3 if has_steps else 0.17, wspace=0.6
    )
    if has_steps:
        shown = bars.draw_by_step(found[-1], steps, numbers, _MOST_COLUMNS)
        found[-1].set_ylabel("time of a step (ms)")
        if min(step.step for step in steps):
            found[-1].set_xlabel(f"the last {len(set(numbers))} steps")
        key(figure, shown, is_placed=True)
    if facts.metric is not None:
        lines, _ = curves.lines_of(facts.metric, None)
        ends = curves.draw_metric(found[0], facts.metric.name, lines, facts.metric.unit_of(), _MOST_LINES)
        # "rank 3: nan from step 21" would not fit.
        labels = [(x, y, label.partition(" from ")[0], color) for x, y, label, color in ends]
        if not has_steps:
            figure.subplots_adjust(right=0.97 - _LETTER * max((len(label) for _, _, label, _ in labels), default=0))
        label_ends(found[0], labels)
        if has_steps and before is None:
            found[0].set_xlabel(f"{facts.metric.unit_of()}, as logged")
            found[-1].set_xlabel(f"{found[-1].get_xlabel()} of the cell")
    return figure


def _steps_before(facts: _Facts) -> int | None:
    """Return the number that the program passed for the first step of the cell.

    Returns 0 if it passed none, and None if the numbers do not count the steps of the cell.
    """
    metric, run = facts.metric, facts.run
    if metric is None or run is None:
        return 0
    mine = metric.cells == run.cell
    if not metric.is_given[mine].any():
        return 0
    firsts = set()
    for rank in np.unique(metric.ranks[mine]):
        given = np.sort(metric.steps[mine & (metric.ranks == rank)])
        is_each = len(given) and (np.diff(given) == 1).all() and abs(len(given) - run.steps) <= 1
        firsts.add(int(given[0]) if is_each else None)
    return firsts.pop() if len(firsts) == 1 else None


def _small(png: io.BytesIO, about: Mapping[str, str]) -> bytes:
    """Return the same picture with fewer colours."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    said = PngInfo()
    for name, value in about.items():
        said.add_text(name, value)
    data = io.BytesIO()
    with Image.open(png) as image:
        few = image.convert("RGBA").quantize(_COLOURS, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
        few.save(data, format="PNG", pnginfo=said, dpi=(_DPI, _DPI), optimize=True)
    return data.getvalue()
