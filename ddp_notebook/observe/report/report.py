"""A training cell in figures and words: what its steps took, why, and what to try.

cell 7, In [12]: 18 steps on 4 ranks, 84 ms each (trimmed mean, without the first 2), 1,515 samples/s

rank  step ms  input  compute  exposed  waiting  optimizer  rest  samples/s
all      84.5    1 %     50 %      1 %     44 %        2 %  0.6 %      1515
0        84.5    1 %     36 %      1 %     59 %        2 %  0.6 %       379
2        84.5    1 %     95 %      1 %      0 %        2 %  0.6 %       379

59 % of the step waits for rank 2, whose forward takes 6.0 times the others'.
Try:
- give rank 2 less work, or look for what slows its forward: it costs the others 50 ms of each step
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddp_notebook.observe.report.advice import Parts, gradients_of, is_sharded, suggestions, verdict
from ddp_notebook.observe.report.bubbles import bubbles
from ddp_notebook.observe.report.memory import page_faults
from ddp_notebook.observe.report.network import network
from ddp_notebook.observe.report.remote import served
from ddp_notebook.observe.report.sharing import blocks_of, cores
from ddp_notebook.observe.steps.apart import Bounded, apart
from ddp_notebook.observe.steps.steps import measure, typical
from ddp_notebook.observe.steps.waits import straggler_of
from ddp_notebook.observe.tables.matching import RowSource, calls_of, prompt_of
from ddp_notebook.observe.views import WARM_UP, Step, Straggler, settled
from ddp_notebook.records.schema import SPANS
from ddp_notebook.records.units import ms, percent
from ddp_notebook.records.words import train_apart

_COLUMNS = ("input", "compute", "exposed", "waiting", "optimizer", "rest")
_PASSES = ("forward", "backward", "input gradient", "weight gradient")
_TIMES = tuple(f"{name}_ns" for name in (*_COLUMNS, "communication", "overlapped"))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Report:
    """What a training cell's steps took. As text it is the table that `%ddp_report` shows.

    `compute` is forward and backward; `exposed` is communication that the ranks waited for while data moved, `waiting`
    the time for which they waited for slower ranks; `rest` is what lies between.
    """

    cell: int | None  # None: no cell has steps
    prompt: str  # of the cell: "In [8]"; empty where it had none
    steps: int  # that were looked at, of the rank that has the most
    all_steps: int  # steps of the cell; more than steps + skipped if the recording was full
    skipped: int  # steps at the start that were not
    overall: Parts | None
    ranks: tuple[Parts, ...]
    straggler: Straggler | None
    efficiency: float | None  # samples/s over those of as many single ranks; None: it was not measured for this cell
    notes: tuple[str, ...]  # sentences: how that compares with one rank alone, and what is missing
    verdict: str  # a sentence
    suggestions: tuple[str, ...]

    def __repr__(self) -> str:
        if self.overall is None:
            return f"Report({self.verdict})"
        steps = self._counted()
        return f"Report(cell {self.cell}, {steps} of {ms(self.overall.step_ns)}: {self.verdict})"

    def __str__(self) -> str:
        if self.overall is None:
            return "\n".join([f"{self.verdict}.", *self._noted()])
        lines = [
            self._head(self.overall),
            *self._noted(),
            "",
            *_table([self.overall, *self.ranks]),
            "",
            f"{self.verdict}.",
        ]
        if self.suggestions:
            lines += ["Try:", *(f"- {text}" for text in self.suggestions)]
        return "\n".join(lines)

    def _head(self, overall: Parts) -> str:
        count = f"{self._counted()} on {len(self.ranks)} rank{'s' * (len(self.ranks) != 1)}"
        skipped = f", without the first {self.skipped}" if self.skipped else ""
        cell = f"cell {self.cell}, {self.prompt}" if self.prompt else f"cell {self.cell}"
        text = f"{cell}: {count}, {ms(overall.step_ns)} each (trimmed mean{skipped})"
        if overall.samples_per_s is not None:
            text += f", {overall.samples_per_s:,.0f} samples/s"
        return text

    def _counted(self) -> str:
        """The steps, and how many there were if the first ones are not recorded any more."""
        if self.steps + self.skipped < self.all_steps:
            return f"the last {self.steps:,} of {self.all_steps:,} steps"
        return f"{self.steps} step{'s' * (self.steps != 1)}"

    def _noted(self) -> list[str]:
        return [f"{note}." for note in self.notes]


def report(recording: Bounded, cell: int | None = None) -> Report:
    """The report of a training cell.

    Args:
        recording: what the ranks have recorded.
        cell: this cell; None: the last one that holds steps.

    Example:
        >>> from tests.observe.synthetic import simulate
        >>> report(simulate(slow=2, phase="forward", extra_ms=50)).verdict
        "59 % of the step waits for rank 2, whose forward takes 6.0 times the others'"
    """
    if cell is None:
        cell = _last_cell_with_steps(recording)
    measured = measure(recording, cell) if cell is not None else []
    if cell is None or not measured:
        return Report(
            cell=cell,
            prompt="",
            steps=0,
            all_steps=0,
            skipped=0,
            overall=None,
            ranks=(),
            straggler=None,
            efficiency=None,
            notes=(
                *(one.note for one in bubbles(recording, cell)),
                *served(recording, cell),
                *_what_was_lost(recording),
            ),
            verdict=_what_is_missing(recording, cell),
            suggestions=(),
        )
    slow = straggler_of(measured, recording.hosts)
    every = [one.step for one in measured]
    found = settled(every)
    of_rank = {rank: [step for step in found if step.rank == rank] for rank in sorted({step.rank for step in found})}
    kept = typical(found)
    ranks = tuple(_parts([step for step in kept if step.rank == rank] or own, rank) for rank, own in of_rank.items())
    overall = _mean(ranks)
    count = max(len(own) for own in of_rank.values())
    efficiency = _efficiency(recording, overall, len(ranks), cell)
    compared = _compared(recording, cell, efficiency, len(ranks))
    pipelines = bubbles(recording, cell)
    bubble = max(pipelines, key=lambda one: one.lost_ns, default=None)
    gpus = recording.rows("resource")["gpu_allocated_bytes"]
    faults = page_faults(recording, found, overall.step_ns)
    return Report(
        cell=cell,
        prompt=prompt_of(recording, cell),
        steps=count,
        all_steps=1 + max(step.step for step in every),
        skipped=WARM_UP if len(found) < len(every) else 0,
        overall=overall,
        ranks=ranks,
        straggler=slow,
        efficiency=efficiency,
        notes=(
            *_apart(recording, cell),
            *(one.note for one in pipelines),
            *blocks_of(recording, kept),
            *compared,
            *cores(recording, list(of_rank)),
            *served(recording, cell),
            *_clocks(recording, ranks),
            *_what_was_lost(recording),
        ),
        verdict=verdict(overall, ranks, slow, count, recording.hosts, network(recording, found), bubble, faults),
        suggestions=suggestions(
            overall,
            ranks,
            slow,
            gradients_of(recording, found),
            steps=count,
            has_gpu=bool((gpus >= 0).any()),
            is_sharded=is_sharded(recording, found),
            bubble=bubble,
            page_faults=faults,
        ),
    )


def _last_cell_with_steps(recording: RowSource) -> int | None:
    spans = recording.rows("span")
    cells = spans["cell"][(spans["kind"] == SPANS.index("optimizer")) & (spans["end_ns"] >= 0)]
    return int(cells.max()) if len(cells) else None


def _parts(steps: Sequence[Step], rank: int) -> Parts:
    duration = sum(step.duration_ns for step in steps)
    known = [step.samples for step in steps if step.samples is not None]
    return Parts(
        rank=rank,
        step_ns=duration / len(steps),
        **{name: sum(getattr(step, name) for step in steps) / len(steps) for name in _TIMES},
        samples_per_s=float(np.mean(known)) * len(steps) / duration * 1e9 if known and duration else None,
    )


def _mean(ranks: Sequence[Parts]) -> Parts:
    """All ranks together: the mean of their times, and the sum of their samples."""
    known = [parts.samples_per_s for parts in ranks if parts.samples_per_s is not None]
    return Parts(
        rank=None,
        **{name: sum(getattr(parts, name) for parts in ranks) / len(ranks) for name in ("step_ns", *_TIMES)},
        samples_per_s=sum(known) if len(known) == len(ranks) else None,
    )


def _is_of(alone: Mapping[str, Any], cell: int) -> bool:
    return alone.get("cell", cell) == cell


def _efficiency(recording: RowSource, overall: Parts, world_size: int, cell: int) -> float | None:
    """Samples per second over those of as many ranks that each work alone; batches count as equal where unknown."""
    alone = recording.baseline
    if not alone or not _is_of(alone, cell):
        return None
    if overall.samples_per_s and (single := alone.get("samples_per_s") or 0) > 0:
        return overall.samples_per_s / (world_size * float(single))
    if overall.step_ns and (single_ns := alone.get("step_ns") or 0) > 0:
        return float(single_ns) / overall.step_ns
    return None


def _compared(recording: RowSource, cell: int, efficiency: float | None, world_size: int) -> tuple[str, ...]:
    """A note, where one rank alone was measured."""
    alone = recording.baseline
    if not alone:
        return ()
    if not _is_of(alone, cell):
        prompt = prompt_of(recording, alone["cell"])
        where = f"{alone['cell']}, {prompt}" if prompt else alone["cell"]
        return (f"One rank alone was measured in cell {where}, which this is not compared with",)
    if efficiency is None:
        return ()
    took = f"{ms(alone['step_ns'])} a step" if alone.get("step_ns") else ""
    samples = f"{alone['samples_per_s']:,.0f} samples/s" if alone.get("samples_per_s") else ""
    figures = ", ".join(filter(None, [took, samples]))
    return (f"That is {percent(efficiency)} of {world_size} times one rank alone: {figures}",)


def _apart(recording: Bounded, cell: int) -> tuple[str, ...]:
    ranks = apart(recording, cell)
    return (f"{(words := train_apart(ranks))[0].upper()}{words[1:]}",) if ranks else ()


def _clocks(recording: RowSource, ranks: Sequence[Parts]) -> tuple[str, ...]:
    """A note, where ranks have clocks of their own: below which bound no rank is said to wait for another."""
    errors = sorted(recording.clock_error_ns(parts.rank) for parts in ranks if parts.rank is not None)
    if not any(errors):
        return ()
    return (f"Clocks of the hosts are compared within {ms(sum(errors[-2:]))}: no wait that is shorter is told",)


def _what_was_lost(recording: Bounded) -> tuple[str, ...]:
    lost = sum(recording.dropped.values())
    return (f"{lost:,} row{'s were' if lost != 1 else ' was'} lost: some steps may be missing",) if lost else ()


def _what_is_missing(recording: RowSource, cell: int | None) -> str:
    where = "" if cell is None else f" in cell {cell}"
    how = (
        "steps are seen of optimizers that are torch.optim's or derived from torch.optim.Optimizer, in cells on the "
        "ranks, and of DistributedOptimizer on the rank that calls its step"
    )
    spans, calls = recording.rows("span"), calls_of(recording, cell)
    kinds = spans["kind"] if cell is None else spans["kind"][spans["cell"] == cell]
    if not len(kinds) and not len(calls):
        if cell is not None and (last := _last_cell_with_steps(recording)) is not None:
            return f"Nothing was recorded{where}: the last one that trained is cell {last}"
        return f"Nothing was recorded{where}: {how}; if you turned recording off, %ddp_record values turns it on"
    passes = int(np.isin(kinds, [*map(SPANS.index, _PASSES)]).sum())
    seen = [f"{passes} forwards and backwards"] * bool(passes) + (
        [f"{len(calls)} communication call{'s' * (len(calls) != 1)}"] if len(calls) else []
    )
    return f"No optimizer step was recorded{where}, only {' and '.join(seen) or 'the cell itself'}: {how}"


def _table(rows: Sequence[Parts]) -> list[str]:
    table = [["rank", "step ms", *_COLUMNS, "samples/s"]]
    for parts in rows:
        shares = [percent(parts.share(getattr(parts, f"{name}_ns"))) for name in _COLUMNS]
        samples = "" if parts.samples_per_s is None else f"{parts.samples_per_s:.0f}"
        table.append(["all" if parts.rank is None else str(parts.rank), f"{parts.step_ns / 1e6:.1f}", *shares, samples])
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    return ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in table]
