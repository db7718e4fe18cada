"""What stays of a live view in a saved notebook: one line of text that states the result, and a picture."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ddp_notebook.observe.steps.steps import measure
from ddp_notebook.observe.steps.waits import straggler_of
from ddp_notebook.observe.tables.matching import RowSource, prompt_of
from ddp_notebook.observe.tables.recorded import RecordedTables
from ddp_notebook.observe.tables.remote import latest
from ddp_notebook.observe.views import Metric, Step, Straggler, main_metric, settled
from ddp_notebook.records.schema import RPC_KINDS, RPC_SIDES, SPANS, Rows
from ddp_notebook.records.units import ms, number, two_figures
from ddp_notebook.records.words import rank_on

if TYPE_CHECKING:
    from ddp_notebook.observe.figures.drawing import Picture

_MOST_MEASURED = 3000  # steps, of all ranks together, the last ones: 0.2 s
_MOST_COLUMNS = 100
_MOST_LINES = 8
_HEIGHT = 3.1  # inches
_DPI = 144
_LETTER = 0.0085  # width of one at the end of a line, of the picture's
_COLOURS = 128  # of the picture: a third of the bytes


def text(recording: RecordedTables, cell: int | None = None) -> str:
    """The result in one line, each part only where the recording has it.

    Args:
        recording: what the ranks have recorded.
        cell: of this cell; None: of the newest run, which is one cell, or several whose steps go on from each other.

    Example:
        >>> from ddp_notebook.widgets import simulate
        >>> text(simulate(world_size=4), cell=2)
        '4 ranks, 60 steps, loss 0.21 -> 0.11, 47 ms/step, 9.5 % exposed communication, rank 2 slowest'
    """
    return _Facts.of(recording, cell).words()


def picture(recording: RecordedTables, cell: int | None = None) -> bytes:
    """The loss of each rank and what the time of its steps went into, as a PNG that reads on light and dark pages.

    Arguments as those of `text`, which is the picture's title, and its description for readers who cannot see it.
    """
    facts = _Facts.of(recording, cell)
    drawn = _draw(facts)
    data = io.BytesIO()
    about = {"Title": "ddp_notebook", "Description": facts.words(), "Software": "ddp_notebook"}
    drawn.savefig(data, format="png", dpi=_DPI)
    return _small(data, about)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Facts:
    """What the text and the picture show."""

    world_size: int
    hosts: tuple[str, ...]
    cell: int | None
    run: str  # which one this is: "In [8], the last of 3 runs"; "": there is no other
    steps: int
    metric: Metric | None
    measured: tuple[Step, ...]  # the last ones
    straggler: Straggler | None
    calls: int
    remote_calls: int
    dropped: int

    @classmethod
    def of(cls, recording: RecordedTables, cell: int | None) -> _Facts:
        spans = recording.rows("span")
        spans = spans[spans["kind"] == SPANS.index("optimizer")]
        calls, remote = recording.rows("call"), latest(recording.rows("rpc"))
        remote = remote[(remote["side"] == RPC_SIDES.index("caller")) & (remote["kind"] != RPC_KINDS.index("torch"))]
        metrics = recording.metrics
        run, cells = ("", [cell]) if cell is not None else _newest_run(recording, metrics, spans)
        if cells:
            spans, calls, remote = (rows[np.isin(rows["cell"], cells)] for rows in (spans, calls, remote))
        source: RowSource = recording
        if len(spans) > _MOST_MEASURED:
            source = _Since(recording, int(np.partition(spans["end_ns"], -_MOST_MEASURED)[-_MOST_MEASURED]))
        found = measure(source, cells[0] if len(cells) == 1 else None)
        found = [one for one in found if not cells or one.step.cell in cells]
        return cls(
            world_size=recording.world_size,
            hosts=recording.hosts,
            cell=cell,
            run=run,
            steps=_count_steps(spans, [one.step for one in found]),
            metric=_metric(metrics, cells),
            measured=tuple(one.step for one in found),
            straggler=straggler_of(found, recording.hosts),
            calls=len(calls),
            remote_calls=len(remote),
            dropped=sum(recording.dropped.values()),
        )

    def words(self) -> str:
        parts = [f"{self.world_size} rank{'s' * (self.world_size != 1)}"]
        if self.steps:
            parts.append(f"{self.steps:,} step{'s' * (self.steps != 1)}")
        parts += _course(self.metric)
        counted = settled(self.measured)
        if counted:
            parts.append(f"{ms(float(np.median([step.duration_ns for step in counted])))}/step")
            exposed = sum(step.exposed_ns for step in counted) / max(sum(step.duration_ns for step in counted), 1)
            if self.world_size > 1 and any(step.communication_ns for step in counted):
                parts.append(f"{two_figures(100 * exposed)} % exposed communication")
        elif self.calls:
            parts.append(f"{self.calls:,} communication call{'s' * (self.calls != 1)}")
        if self.remote_calls:
            parts.append(f"{self.remote_calls:,} remote call{'s' * (self.remote_calls != 1)}")
        if self.straggler is not None:
            parts.append(f"{rank_on(self.straggler.rank, self.hosts)} slowest")
        if len(parts) == 1:
            parts.append("nothing recorded" if self.cell is None else f"nothing recorded in cell {self.cell}")
        if self.dropped:
            parts.append(f"{self.dropped:,} rows dropped")
        return ", ".join(parts) + (f" ({self.run})" if self.run else "")


class _Since:
    """The end of a recording, from a time on."""

    def __init__(self, recording: RowSource, begin_ns: int) -> None:
        self._recording = recording
        self._begin_ns = begin_ns
        self.world_size = recording.world_size
        self.hosts = recording.hosts
        self.baseline = recording.baseline

    def rows(self, table: str) -> Rows:
        rows = self._recording.rows(table)
        column = {"span": "start_ns", "call": "issue_ns"}.get(table)
        return rows if column is None else rows[rows[column] >= self._begin_ns]

    def text(self, number: int) -> str:
        return self._recording.text(number)

    def group_of(self, number: int) -> Mapping[str, Any]:
        return self._recording.group_of(number)

    def clock_error_ns(self, rank: int) -> int:
        return self._recording.clock_error_ns(rank)


def _count_steps(optimizers: Rows, measured: Sequence[Step]) -> int:
    """The steps of all cells together; in each cell those of the rank that has the most."""
    counts = {
        int(cell): 1 + int(optimizers["step"][optimizers["cell"] == cell].max())
        for cell in np.unique(optimizers["cell"])
    }
    of_cell: dict[int, int] = {}
    for step in measured:  # where several optimizers take turns there are fewer
        of_cell[step.cell] = max(of_cell.get(step.cell, 0), step.step + 1)
    return sum((counts | of_cell).values())


# ---- the metric


def _newest_run(recording: RecordedTables, metrics: Mapping[str, Metric], optimizers: Rows) -> tuple[str, list[int]]:
    """Return which run this is in words, and its cells: of the main metric, or a cell after it that has trained."""
    runs = metrics[main_metric(metrics)].runs if metrics else []
    trained = [[cell] for cell in np.unique(optimizers["cell"]).tolist() if not runs or cell > runs[-1][-1]]
    if not runs:
        runs = trained
    elif trained:
        runs = [*runs, *trained]
    if not runs:
        return "", []
    first, last = (prompt_of(recording, one) or f"cell {one}" for one in (runs[-1][0], runs[-1][-1]))
    name = first if first == last else f"{first} to {last}"
    if len(runs) == 1:
        return ("" if first.startswith("cell") else name), runs[-1]
    return f"{name}, the last of {len(runs)} runs", runs[-1]


def _metric(metrics: Mapping[str, Metric], cells: Sequence[int]) -> Metric | None:
    """The metric to show, of these cells; none of them: of all."""
    found = {name: mine for name, one in metrics.items() if (mine := _of_cells(one, cells)) is not None}
    if not found:
        return None
    metric = found[main_metric(found)]
    return metric if metric.is_continued else _of_cells(metric, metric.runs[-1])


def _of_cells(metric: Metric, cells: Sequence[int]) -> Metric | None:
    mine = np.isin(metric.cells, cells) if cells else np.ones(len(metric.cells), bool)
    if not mine.any():
        return None
    columns = {name: getattr(metric, name)[mine] for name in ("ranks", "steps", "values", "times_ns", "cells")}
    return Metric(name=metric.name, **columns)


def _course(metric: Metric | None) -> list[str]:
    """Its first and last value, mean of the ranks."""
    if metric is None:
        return []
    wrong = ~np.isfinite(metric.values)
    if wrong.any():
        first = int(metric.steps[wrong].min())
        value = metric.values[wrong & (metric.steps == first)][0]
        return [f"{metric.name} {value:g} from step {first}"]
    begin, end = (
        float(np.mean([metric.values[metric.ranks == rank][at] for rank in np.unique(metric.ranks)])) for at in (0, -1)
    )
    single = len(metric.values) == len(np.unique(metric.ranks))
    return [f"{metric.name} {number(end)}" if single else f"{metric.name} {number(begin)} -> {number(end)}"]


# ---- the picture


def _draw(facts: _Facts) -> Picture:
    from ddp_notebook.observe.figures import bars, curves
    from ddp_notebook.observe.figures.drawing import key, label_ends, picture

    steps, numbers = facts.measured, _in_a_row(facts.measured)
    has_steps = len(set(numbers)) > 1
    columns = [1.0] * ((facts.metric is not None) + has_steps)
    height = _HEIGHT if columns else 0.4  # a line of text, and nothing below it
    figure, found = picture(facts.words(), height, columns=columns or [1.0], layout=None, title_pt=10)
    if not columns:
        found[0].remove()
        return figure
    figure.subplots_adjust(left=0.09, right=0.985, top=0.88, bottom=0.3, wspace=0.6)
    if has_steps:
        shown = bars.draw_by_step(found[-1], steps, numbers, _MOST_COLUMNS)
        found[-1].set_ylabel("time of a step (ms)")
        if min(numbers):
            found[-1].set_xlabel(f"the last {len(set(numbers))} steps")
        key(figure, shown, is_placed=True)
    if facts.metric is not None:
        lines, _ = curves.lines_of(facts.metric, None)
        ends = curves.draw_metric(found[0], facts.metric.name, lines, _MOST_LINES)
        # "rank 3: nan from step 21" would not fit.
        labels = [(x, y, label.partition(" from ")[0], color) for x, y, label, color in ends]
        if not has_steps:
            figure.subplots_adjust(right=0.97 - _LETTER * max((len(label) for _, _, label, _ in labels), default=0))
        label_ends(found[0], labels)
    return figure


def _in_a_row(steps: Sequence[Step]) -> list[int]:
    """The numbers of steps, counted on from cell to cell."""
    counts: dict[int, int] = {}
    for step in steps:
        counts[step.cell] = max(counts.get(step.cell, 0), step.step + 1)
    first = {cell: sum(count for before, count in counts.items() if before < cell) for cell in counts}
    return [first[step.cell] + step.step for step in steps]


def _small(png: io.BytesIO, about: Mapping[str, str]) -> bytes:
    """The same picture with few colours."""
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
