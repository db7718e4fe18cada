"""Report on a training cell, in numbers and sentences: breakdown of step times, causes, and advice.

In [12]: 20 steps on 4 ranks, 84 ms/step (mean of steps 2 to 19 without the shortest and the longest, of 4 ranks), \
1,515 samples/s, effective batch 32 x 4 ranks = 128

rank  step ms  input  compute  exposed  waiting  optimizer  rest  samples/s
all      84.5    1 %     50 %      1 %     44 %        2 %  0.6 %      1515
0        84.5    1 %     36 %      1 %     59 %        2 %  0.6 %       379
2        84.5    1 %     95 %      1 %      0 %        2 %  0.6 %       379

59 % of the step waits for rank 2, whose forward takes 6.0 times the others'.
Try:
- give rank 2 less work, or find out what slows down its forward: it costs the others 50 ms of each step \
(mean)

ms of a step  mean  median  90 %   max
step          84.5    84.5  84.6  85.0
forward       22.5    10.0  60.0  60.0
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddp_notebook.observe.report.advice import StepParts, gradients_of, is_sharded, suggestions, verdict
from ddp_notebook.observe.report.bubbles import bubbles
from ddp_notebook.observe.report.cores import CoreUse, counts_cores, shared, taken
from ddp_notebook.observe.report.effective_batch import effective_batch
from ddp_notebook.observe.report.loading import loader_of, loads_usually, started_in
from ddp_notebook.observe.report.memory_growth import growing_alone
from ddp_notebook.observe.report.network_waits import network
from ddp_notebook.observe.report.outside import WORKERS_OUTSIDE, Outside, Row, outside
from ddp_notebook.observe.report.page_faults import page_faults
from ddp_notebook.observe.report.rpc_sentences import served
from ddp_notebook.observe.report.without_optimizer import did, instead_of, last_without_optimizer
from ddp_notebook.observe.steps.run import TrainingRun, run_of
from ddp_notebook.observe.steps.steps import StepTable, measure
from ddp_notebook.observe.steps.waits import straggler_of
from ddp_notebook.observe.tables.matching import RowSource, calls_of, label_of
from ddp_notebook.observe.tables.parts import Bounded, CellPart
from ddp_notebook.observe.tables.ring_buffer import select
from ddp_notebook.observe.views import WARM_UP, Straggler
from ddp_notebook.records.names import readable
from ddp_notebook.records.schema import SPANS, Rows
from ddp_notebook.records.units import ms, percent
from ddp_notebook.records.words import train_apart

_OPTIMIZER, _CELL = map(SPANS.index, ("optimizer", "cell"))


def apart(recording: Bounded, cell: int) -> list[int]:
    """Return the ranks of a cell that took at least two optimizer steps without communication from the first step on.

    Only optimizer steps of the main thread count. Return [] for a single rank, or if the necessary rows are lost.

    Example:
        >>> from tests.observe.synthetic import simulate
        >>> apart(simulate(world_size=2), 1)
        []
        >>> apart(simulate(world_size=2, is_ddp=False, has_calls=False), 1)
        [0, 1]
    """
    spans, calls = recording.rows("span"), recording.rows("call")
    spans = select(spans, (spans["cell"] == cell) & (spans["kind"] == _OPTIMIZER) & (spans["thread"] == 0))
    found = [
        rank
        for rank in np.unique(spans["rank"]).tolist()
        if rank not in recording.dropped
        and _sends_nothing(
            select(calls, calls["rank"] == rank), cell, int(spans["start_ns"][spans["rank"] == rank].min())
        )
        and _steps_again(select(spans, spans["rank"] == rank))
    ]
    return found if len(found) > 1 else []


def _steps_again(spans: Rows) -> bool:
    return bool((np.unique(spans["name"], return_counts=True)[1] > 1).any())


def _sends_nothing(calls: Rows, cell: int, since_ns: int) -> bool:
    """Return whether a rank certainly made no call after `since_ns`, the time of its first optimizer step in a cell."""
    if (calls["issue_ns"][calls["cell"] == cell] > since_ns).any():
        return False
    calls = select(calls, calls["call"] > 0)  # a bucket of a comm hook has no number
    # The oldest rows are dropped first. If the oldest kept row is later, rows of this cell may be missing.
    return not len(calls) or bool(calls["call"].min() == 1 or calls["issue_ns"].min() < since_ns)


_MOST_BLOCKS = 5
_BLOCK = SPANS.index("block")


def blocks_of(recording: RowSource, steps: StepTable) -> tuple[str, ...]:
    """Return a note about the named blocks of these steps, the longest first, mean of steps and ranks; () without
    blocks.
    """
    spans = recording.rows("span")
    spans = select(spans, (spans["kind"] == _BLOCK) & (spans["end_ns"] >= 0))
    if not len(spans) or not len(steps):
        return ()
    total: Counter[str] = Counter()
    for rank in steps.ranks:
        own, mine = select(spans, spans["rank"] == rank), steps[steps.rank == rank]
        order = np.argsort(mine.start_ns, kind="stable")
        at = np.searchsorted(mine.start_ns[order], own["start_ns"], "right") - 1
        inside = (at >= 0) & (own["start_ns"] < mine.end_ns[order][np.maximum(at, 0)])
        for name in np.unique(own["name"][inside]).tolist():
            rows = select(own, inside & (own["name"] == name))
            total[recording.text(name)] += int((rows["end_ns"] - rows["start_ns"]).sum())
    whole = int(steps.duration_ns.sum())
    most = total.most_common(_MOST_BLOCKS)
    told = [f"{readable(name)} {ms(ns / len(steps))} ({percent(ns / whole)})" for name, ns in most]
    more = f", and {len(total) - _MOST_BLOCKS} more" if len(total) > _MOST_BLOCKS else ""
    return (f"Named blocks of a step: {', '.join(told)}{more}",) if told else ()


FEWEST_STEPS = 3  # a report on fewer steps lists only their durations
_TOLD = 0.005  # share of a cell above which a part without a count has its own row
_MOST_RANKS = 8  # a report on few steps lists each rank up to this number, and otherwise the range
_COLUMNS = ("input", "compute", "exposed", "waiting", "optimizer", "rest")
_PASSES = ("forward", "backward", "input gradient", "weight gradient")
_TIMES = tuple(
    f"{name}_ns" for name in (*_COLUMNS, "workers", "forward", "backward", "answers", "communication", "overlapped")
)
_OWN = {"forward_ns": "own_forward_ns", "backward_ns": "own_backward_ns"}  # without exposed communication and waiting
_PHASES = {  # name in a report -> column of a `StepTable`; an indented phase is part of the phase above
    "input": "input",
    "  workers": "workers",
    "forward": "own_forward",
    "backward": "own_backward",
    "exposed": "exposed",
    "waiting": "waiting",
    "  answers": "answers",
    "optimizer": "optimizer",
    "rest": "rest",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Duration of one phase of a step, over all ranks."""

    name: str
    mean_ns: float  # over the steps in the mean of the run
    median_ns: float  # this and the following: over all steps except the first two of the cell
    most_ns: float  # 90th percentile
    max_ns: float


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Report:
    """Report on the steps of a training cell. As text it is the table that `%ddp_report` shows.

    `compute` is forward, backward and the execution of remote calls. `exposed` is communication during which the ranks
    waited while data moved. `waiting` is the time that they waited for slower ranks and for answers of remote calls.
    `rest` is the time between these phases. `workers` is the part of `input` for the start and end of DataLoader
    workers, `answers` the part of `waiting` for remote calls.
    """

    cell: int | None  # None: no cell has steps
    run: TrainingRun | None  # numbers of the run, which other displays share
    steps: int  # number of inspected steps, of the rank with the most
    all_steps: int  # steps of the cell; more than steps + skipped if rows were dropped
    skipped: int  # number of first steps that were not inspected
    overall: StepParts | None
    ranks: tuple[StepParts, ...]
    phases: tuple[Phase, ...]
    outside: Outside | None  # time of the cell in its steps and outside of them; None: unknown
    taken: CoreUse | None  # time in which ranks waited for a core; None: not counted
    batch: str  # effective batch, such as "32 x 4 ranks x 2 micro-steps = 256"; "": not certain
    times: tuple[str, ...]  # lines with the durations of the steps, if there are too few for phases
    same_draws: tuple[str, ...]  # sentences about ranks that have drawn the same random numbers
    synchronises: bool  # the ranks synchronise gradients in DDP buckets
    straggler: Straggler | None
    efficiency: float | None  # samples/s relative to the same number of single ranks; None: not measured for this cell
    notes: tuple[str, ...]  # sentences, for example the comparison with one rank alone, or missing rows
    verdict: str  # one sentence
    suggestions: tuple[str, ...]

    @property
    def prompt(self) -> str:
        """Displayed name of the cell: "In [8]"."""
        return "" if self.run is None else self.run.label

    def __repr__(self) -> str:
        if self.overall is None or self.run is None:
            return f"Report({self.verdict})"
        return f"Report({self.run.label}, {self._counted(self.run)}, {self.run.per_step}: {self.verdict})"

    def __str__(self) -> str:
        if self.overall is None or self.run is None:
            return "\n".join([f"{self.verdict}.", *self._noted()])
        if self.times:
            return "\n".join([self._head(self.run, self.overall), *self.times])
        is_first = (
            self.taken is not None
            and self.taken.by_others
            and self.verdict == self.taken.words(self.overall.step_ns, len(self.ranks))
        )
        lines = [
            self._head(self.run, self.overall),
            *(f"{sentence}." for sentence in self.same_draws),
            *([f"{self.verdict}."] if is_first else []),
            *self._noted(),
            "",
            *_table(self.ranks if len(self.ranks) == 1 else [self.overall, *self.ranks]),
            "",
            *([] if is_first else [f"{self.verdict}."]),
        ]
        if self.suggestions:
            lines += ["Try:", *(f"- {text}" for text in self.suggestions)]
        lines += ["", *_table_of_phases(self.phases)]
        if self.outside is not None:
            lines += ["", *_table_of_cell(self.outside)]
        return "\n".join(lines)

    def _head(self, run: TrainingRun, overall: StepParts) -> str:
        count = f"{self._counted(run)} on {run.ranks} rank{'s' * (run.ranks != 1)}"
        if self.times:
            return f"{run.label}: {count}"
        text = f"{run.label}: {count}, {run.per_step} ({run.definition})"
        if overall.samples_per_s is not None:
            text += f", {_rate(overall.samples_per_s, self.ranks)} samples/s"
        return text + (f", effective batch {self.batch}" if self.batch else "")

    def _counted(self, run: TrainingRun) -> str:
        """Return the number of steps, and the total number if the first ones were dropped."""
        if self.steps + self.skipped < self.all_steps:
            return f"the last {self.steps:,} of {self.all_steps:,} steps"
        return run.counted

    def _noted(self) -> list[str]:
        return [f"{note}." for note in self.notes]


def report(recording: Bounded, cell: int | None = None) -> Report:
    """Return the report on a training cell.

    Args:
        recording: the recorded tables.
        cell: number of the cell; None: the last one with steps, or that ran a pipeline, remote calls or inference
            without an optimizer.

    Example:
        >>> from tests.observe.synthetic import simulate
        >>> report(simulate(slow=2, phase="forward", extra_ms=50)).verdict
        "59 % of the step waits for rank 2, whose forward takes 6.0 times the others'"
    """
    later: tuple[str, ...] = ()
    if cell is None:
        cell = _last_cell_with_steps(recording)
        other = last_without_optimizer(recording, -1 if cell is None else cell)
        if other is not None:
            return _without_steps(recording, other, instead_of(recording, other, cell))
        later = () if cell is None else _later_passes(recording, cell)
    own = CellPart(recording, cell) if cell is not None else None
    run = None if own is None else run_of(own, cell)
    if cell is None or own is None or run is None:
        return _without_steps(recording, cell, _what_is_missing(recording, cell))
    every = measure(own, cell)
    found = every.settled
    kept = found.typical
    ranks = tuple(_parts(_or(kept[kept.rank == rank], found[found.rank == rank]), rank) for rank in found.ranks)
    overall = _mean(ranks)
    count = int(np.unique(found.rank, return_counts=True)[1].max())
    all_steps = 1 + int(every.number.max())
    if all_steps < FEWEST_STEPS:
        return _of_few(own, run, every, overall, ranks, all_steps, later)
    slow = straggler_of(every, recording.hosts)
    efficiency = _efficiency(recording, overall, len(ranks), cell)
    pipelines = bubbles(own, cell)
    bubble = max(pipelines, key=lambda one: one.lost_ns, default=None)
    faults = page_faults(own, found, overall.step_ns)
    cores = taken(own, found)
    gradients = gradients_of(own, found)
    of_cell = outside(own, every, np.unique(kept.number))
    started = started_in(every, None if of_cell is None else of_cell.cell_ns)
    return Report(
        cell=cell,
        run=run,
        steps=count,
        all_steps=all_steps,
        skipped=WARM_UP if len(found) < len(every) else 0,
        overall=overall,
        ranks=ranks,
        phases=_phases(found, ranks),
        outside=of_cell,
        taken=cores,
        times=(),
        batch=_batch(own, found, cell),
        same_draws=tuple(own.same_draws.get(cell, ())),
        synchronises=gradients is not None,
        straggler=slow,
        efficiency=efficiency,
        notes=(
            *later,
            *_findings(own, cell),
            *_apart(own, cell),
            *_with_itself(own, overall),
            *(one.note for one in pipelines),
            *blocks_of(own, kept),
            *_memory(own, every),
            *_compared(recording, cell, efficiency, len(ranks)),
            *shared(own, found.ranks),
            *served(own, cell, found),
            *_clocks(recording, ranks),
            *_what_was_lost(recording),
        ),
        verdict=verdict(
            overall,
            ranks,
            slow,
            count,
            recording.hosts,
            network(own, found),
            bubble,
            faults,
            cores,
            started=started,
            world_size=recording.world_size,
        ),
        suggestions=suggestions(
            overall,
            ranks,
            slow,
            gradients,
            steps=count,
            started=started,
            has_gpu=bool((own.rows("resource")["gpu_allocated_bytes"] >= 0).any()),
            is_sharded=is_sharded(own, found),
            bubble=bubble,
            page_faults=faults,
            loader=loader_of(own, found),
            taken=cores,
            loads_usually=loads_usually(found),
            is_too_short=cores is None and counts_cores(own, found.ranks),
        ),
    )


def _without_steps(recording: Bounded, cell: int | None, verdict: str) -> Report:
    return Report(
        cell=cell,
        run=None,
        steps=0,
        all_steps=0,
        skipped=0,
        overall=None,
        ranks=(),
        phases=(),
        outside=None,
        taken=None,
        times=(),
        batch="",
        same_draws=(),
        synchronises=False,
        straggler=None,
        efficiency=None,
        notes=(
            *(() if cell is None else did(recording, cell)),
            *(one.note for one in bubbles(recording, cell)),
            *served(recording, cell),
            *_what_was_lost(recording),
        ),
        verdict=verdict,
        suggestions=(),
    )


def _of_few(
    recording: Bounded,
    run: TrainingRun,
    every: StepTable,
    overall: StepParts,
    ranks: tuple[StepParts, ...],
    all_steps: int,
    later: tuple[str, ...],
) -> Report:
    """Return the report on one or two steps. They are warm-up steps, so it lists only their durations."""
    times = []
    for number in np.unique(every.number).tolist():
        own = every[every.number == number]
        took = own.duration_ns.tolist()
        if len(took) > _MOST_RANKS:
            told = f"{ms(min(took))} to {ms(max(took))} on {len(took)} ranks"
        else:
            told = ", ".join(f"{ms(ns)} on rank {rank}" for rank, ns in zip(own.rank.tolist(), took, strict=True))
        times.append(f"step {number}: {told}")
    found = _findings(recording, run.cell)
    notes = (*later, *found, *_apart(recording, run.cell), *_what_was_lost(recording))
    return Report(
        cell=run.cell,
        run=run,
        steps=all_steps,
        all_steps=all_steps,
        skipped=0,
        overall=overall,
        ranks=ranks,
        phases=(),
        outside=None,
        taken=None,
        times=(*times, *(f"{note}." for note in notes)),
        batch="",
        same_draws=(),
        synchronises=gradients_of(recording, every) is not None,
        straggler=None,
        efficiency=None,
        notes=(),
        verdict=f"Too few steps for more than their times: {all_steps}",
        suggestions=(),
    )


def _or(some: StepTable, others: StepTable) -> StepTable:
    return some if len(some) else others


def _last_cell_with_steps(recording: RowSource) -> int | None:
    spans = recording.rows("span")
    cells = spans["cell"][(spans["kind"] == SPANS.index("optimizer")) & (spans["end_ns"] >= 0)]
    return int(cells.max()) if len(cells) else None


def _later_passes(recording: RowSource, cell: int) -> tuple[str, ...]:
    """Return a note if a later cell seems to have trained without a recorded optimizer step."""
    spans = recording.rows("span")
    cells = spans["cell"][(spans["kind"] == SPANS.index("backward")) & (spans["end_ns"] >= 0)]
    last = int(cells.max(initial=cell))
    if last == cell:
        return ()
    return (
        f"{label_of(recording, last)} ran later with backward passes, but no optimizer step of it was recorded. "
        f"This is the report of {label_of(recording, cell)}",
    )


def _parts(steps: StepTable, rank: int) -> StepParts:
    duration = int(steps.duration_ns.sum())
    known = steps.samples[steps.samples >= 0]
    return StepParts(
        rank=rank,
        step_ns=duration / len(steps),
        **{name: int(steps.parts[_OWN.get(name, name).removesuffix("_ns")].sum()) / len(steps) for name in _TIMES},
        samples_per_s=float(known.mean()) * len(steps) / duration * 1e9 if len(known) and duration else None,
    )


def _phases(steps: StepTable, ranks: Sequence[StepParts]) -> tuple[Phase, ...]:
    """Return the distribution of each phase over steps and ranks, without phases that took no time.

    Args:
        steps: all except the first two of the cell.
        ranks: means of each rank, over the steps in the mean of the run.
    """
    columns = {"step": steps.duration_ns, **{name: steps.parts[part] for name, part in _PHASES.items()}}
    means = _mean(ranks)
    found = []
    for name, taken_ns in columns.items():
        if not taken_ns.any():
            continue
        middle, most = np.percentile(taken_ns, (50, 90)).tolist()
        mean_ns: float = getattr(means, f"{name.strip()}_ns")
        found.append(Phase(name=name, mean_ns=mean_ns, median_ns=middle, most_ns=most, max_ns=float(taken_ns.max())))
    return tuple(found)


def _mean(ranks: Sequence[StepParts]) -> StepParts:
    """Return the values for all ranks together: the mean of their times, and the sum of their samples."""
    known = [parts.samples_per_s for parts in ranks if parts.samples_per_s is not None]
    return StepParts(
        rank=None,
        **{name: sum(getattr(parts, name) for parts in ranks) / len(ranks) for name in ("step_ns", *_TIMES)},
        samples_per_s=sum(known) if len(known) == len(ranks) else None,
    )


def _is_of(alone: Mapping[str, Any], cell: int) -> bool:
    return alone.get("cell", cell) == cell


def _efficiency(recording: RowSource, overall: StepParts, world_size: int, cell: int) -> float | None:
    """Return samples/s relative to the same number of ranks that each work alone. Unknown batch sizes count
    as equal.
    """
    alone = recording.baseline
    if not alone or not _is_of(alone, cell):
        return None
    if overall.samples_per_s and (single := alone.get("samples_per_s") or 0) > 0:
        return overall.samples_per_s / (world_size * float(single))
    if overall.step_ns and (single_ns := alone.get("step_ns") or 0) > 0:
        return float(single_ns) / overall.step_ns
    return None


def _compared(recording: RowSource, cell: int, efficiency: float | None, world_size: int) -> tuple[str, ...]:
    """Return a note about the comparison with one rank alone, if that was measured."""
    alone = recording.baseline
    if not alone:
        return ()
    if not _is_of(alone, cell):
        where = label_of(recording, alone["cell"])
        return (f"The baseline of one rank was measured in {where}, so this cell is not compared with it",)
    if efficiency is None:
        return ()
    took = f"{ms(alone['step_ns'])} a step" if alone.get("step_ns") else ""
    samples = f"{_rate(alone['samples_per_s'])} samples/s" if alone.get("samples_per_s") else ""
    figures = ", ".join(filter(None, [took, samples]))
    return (f"That is {percent(efficiency)} of {world_size} times one rank alone: {figures}",)


def _memory(recording: RowSource, steps: StepTable) -> tuple[str, ...]:
    """Return a note if the memory of one rank alone grows during the steps."""
    rows = recording.rows("resource")
    inside = (rows["time_ns"] >= steps.start_ns.min()) & (rows["time_ns"] <= steps.end_ns.max())
    found = growing_alone(select(rows, inside & np.isin(rows["rank"], steps.ranks)))
    if found is None:
        return ()
    return (f"The resident memory of rank {found.rank} alone grows: {found}. %ddp_memory shows the parts",)


def _batch(recording: Bounded, steps: StepTable, cell: int) -> str:
    """Return the effective batch; "" if a rank did not end the cell, because the inputs are compared then."""
    spans = recording.rows("span")
    cells = select(spans, spans["kind"] == _CELL)
    ended = np.unique(cells["rank"][cells["end_ns"] >= 0])
    if len(ended) and not np.isin(spans["rank"], ended).all():
        return ""
    groups = recording.same_inputs.get(cell)
    if groups is None and any("ok same-batches" in found for found in recording.findings.get(cell, ())):
        return ""  # a file that lacks the groups
    return "" if groups == [] else effective_batch(recording, steps, groups or [])


def _findings(recording: Bounded, cell: int) -> tuple[str, ...]:
    return tuple(f"{found[:1].upper()}{found[1:]}" for found in recording.findings.get(cell, ()))


def _apart(recording: Bounded, cell: int) -> tuple[str, ...]:
    if cell in recording.findings:  # a finding has the cause
        return ()
    ranks = apart(recording, cell)
    return (f"{(words := train_apart(ranks))[0].upper()}{words[1:]}",) if ranks else ()


def _with_itself(recording: RowSource, overall: StepParts) -> tuple[str, ...]:
    """Return a note if the only rank of a session communicates."""
    if recording.world_size > 1 or not overall.exposed_ns:
        return ()
    return ("Rank 0 is the only rank: exposed is the time of its communication with itself",)


def _clocks(recording: RowSource, ranks: Sequence[StepParts]) -> tuple[str, ...]:
    """Return a note about the clock error, if hosts have different clocks. Waits below it are not reported."""
    errors = sorted(recording.clock_error_ns(parts.rank) for parts in ranks if parts.rank is not None)
    if not any(errors):
        return ()
    return (f"The clocks of the hosts agree to within {ms(sum(errors[-2:]))}: shorter waits are not reported",)


def _what_was_lost(recording: Bounded) -> tuple[str, ...]:
    lost = sum(recording.dropped.values())
    return (f"{lost:,} row{'s were' if lost != 1 else ' was'} lost: some steps may be missing",) if lost else ()


def _what_is_missing(recording: RowSource, cell: int | None) -> str:
    where = "" if cell is None else f" in {label_of(recording, cell)}"
    how = (
        "The ranks record the steps of torch.optim optimizers and their subclasses, and those of DistributedOptimizer "
        "on the rank that calls them"
    )
    spans, calls = recording.rows("span"), calls_of(recording, cell)
    kinds = spans["kind"] if cell is None else spans["kind"][spans["cell"] == cell]
    if not len(kinds) and not len(calls):
        if cell is not None and (last := _last_cell_with_steps(recording)) is not None:
            return f"Nothing was recorded{where}. The last cell with optimizer steps is {label_of(recording, last)}"
        return f"No optimizer step was recorded{where}. {how}. If recording is off, %ddp_record values turns it on"
    passes = int(np.isin(kinds, [*map(SPANS.index, _PASSES)]).sum())
    seen = [f"{passes} forwards and backwards"] * bool(passes) + (
        [f"{len(calls)} communication call{'s' * (len(calls) != 1)}"] if len(calls) else []
    )
    return f"No optimizer step was recorded{where}, only {' and '.join(seen) or 'the cell itself'}. {how}"


def _rate(per_s: float, ranks: Sequence[StepParts] = (), *, separator: str = ",") -> str:
    """Format samples per second with enough decimals that the displayed values of the ranks add up to their sum."""
    least = min((one.samples_per_s for one in ranks if one.samples_per_s), default=per_s)
    decimals = 0 if least >= 100 else 1 if least >= 10 else 2 if least >= 1 else 3
    return format(per_s, f"{separator}.{decimals}f")


def _table(rows: Sequence[StepParts]) -> list[str]:
    table = [["rank", "step ms", *_COLUMNS, "samples/s"]]
    for parts in rows:
        shares = [percent(parts.share(getattr(parts, f"{name}_ns"))) for name in _COLUMNS]
        samples = "" if parts.samples_per_s is None else _rate(parts.samples_per_s, rows, separator="")
        table.append(["all" if parts.rank is None else str(parts.rank), f"{parts.step_ns / 1e6:.1f}", *shares, samples])
    return _in_columns(table)


def _table_of_phases(phases: Sequence[Phase]) -> list[str]:
    table = [["ms of a step", "mean", "median", "90 %", "max"]]
    for one in phases:
        times = (one.mean_ns, one.median_ns, one.most_ns, one.max_ns)
        table.append([one.name, *(f"{ns / 1e6:.1f}" for ns in times)])
    return _in_columns(table)


def _table_of_cell(found: Outside) -> list[str]:
    """Return the table with the parts of a cell's time. Short parts without a count share the last row."""
    rows: list[Row] = list(found.steps)
    others = 0.0
    for row in found.rows:
        name, count, ns = row
        if (count and name != WORKERS_OUTSIDE) or ns >= _TOLD * found.cell_ns:
            rows.append(row)
        else:
            others += ns
    if others >= _TOLD * found.cell_ns:
        rows.append(("other", 0, others))
    table = [["time of the cell", "times", "s", "share"]]
    for name, count, ns in rows:
        share = percent(ns / found.cell_ns) if found.cell_ns else ""
        table.append([name, f"{count:,}" if count else "", f"{ns / 1e9:.2f}", share])
    return _in_columns(table)


def _in_columns(table: Sequence[Sequence[str]]) -> list[str]:
    """Format the lines of a table: the first column is left-aligned, the others are right-aligned."""
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    return ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in table]
