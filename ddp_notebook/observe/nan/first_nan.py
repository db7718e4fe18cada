"""Find the first NaN or infinite value of a training run in recorded rows.

A gradient counts only if the run did not recover: `GradScaler` skips steps with infinite gradients, and so may a
program. So the answer is about the steps after the last step in which all recorded gradients were finite.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddp_notebook.errors import UsageError
from ddp_notebook.observe.nan.gradient_inputs import (
    BadGradient,
    Column,
    GradientInputs,
    calls_of,
    kind_of,
    loaded_samples,
    steps_in_words,
    training_cells,
)
from ddp_notebook.observe.nan.metric_values import BadMetric, bad_metrics
from ddp_notebook.observe.tables.matching import label_of, numbers_of, prompt_of
from ddp_notebook.observe.tables.recorded import RecordedTables
from ddp_notebook.records.names import listed
from ddp_notebook.records.words import bad_elements, list_ranks

_MOST_RANKS = 4  # ranks whose samples are listed
_RECORD = "%ddp_record all, and run the cell again"


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstNan:
    """The first NaN or infinite value of a training run. `print` shows the sentence and the details.

    Args:
        cell: number of the cell.
        is_found: gradients or logged numbers were NaN or infinite until the end of the cell.
        sentence: the answer.
        details: further facts, one sentence each.
        step: the first recorded step with such gradients, counted from 0 in the cell; None without such gradients.
        last_clean_step: the last earlier step whose recorded gradients were finite; None if there is none.
        ranks: the ranks that had such gradients in this step before they were averaged.
        gradients: these gradients, by rank and in the order of their averages.
        metrics: logged numbers that were not finite until the end of the cell, the first one first.
    """

    cell: int
    is_found: bool
    sentence: str
    details: tuple[str, ...] = ()
    step: int | None = None
    last_clean_step: int | None = None
    ranks: tuple[int, ...] = ()
    gradients: tuple[BadGradient, ...] = ()
    metrics: tuple[BadMetric, ...] = ()

    @property
    def is_exact(self) -> bool:
        """Return whether the gradients of the step before were recorded and finite."""
        return self.step is not None and self.last_clean_step == self.step - 1

    def __str__(self) -> str:
        return "\n".join([self.sentence, *(f"- {one}" for one in self.details)])


def first_nan(recording: RecordedTables, cell: int | None = None) -> FirstNan:
    """Return where the values of a training run stopped being finite, see `Recording.first_nan`."""
    calls = calls_of(recording)
    cells = training_cells(recording, calls)
    if not cells:
        raise UsageError("no training step and no logged number was recorded; see %ddp_record")
    if cell is not None and cell not in cells:
        known = ", ".join(numbers_of(recording, cells))
        raise UsageError(f"cell {cell} has no recorded training step and no logged number; cells with them: {known}")
    chosen = cells[-1] if cell is None else cell
    gradients = GradientInputs(recording, calls, chosen)
    logged = recording._metrics_of(chosen)
    metrics = bad_metrics(logged)
    where = label_of(recording, chosen)
    last_clean = max((int(step) for step in gradients.clean_steps), default=None)
    bad = [int(step) for step in gradients.bad_steps if last_clean is None or step > last_clean]
    passed = [int(step) for step in gradients.bad_steps if last_clean is not None and step < last_clean]
    passed = sorted({*passed, *map(int, gradients.discarded_steps)} - set(bad))
    details = _passed(gradients, passed)
    if not bad:
        return _without_gradients(chosen, where, gradients, list(logged), metrics, details)
    step = bad[0]
    ranks = gradients.ranks_of(step)
    found = [one for rank in ranks for one in gradients.bad(step, rank)]
    first = [next(one for one in found if one.rank == rank) for rank in ranks]
    some = ranks != gradients.ranks  # finite gradients of another rank show that the weights were finite
    is_exact = some or last_clean == step - 1
    parts = [str(one) for one in _related(metrics, last_clean)[:1]]
    parts.append(_sent(first, step, is_exact, gradients))
    parts.append(_clean(step, last_clean, gradients))
    loaded = _loaded(recording, chosen, ranks, step)
    parts += loaded[: len(ranks) == 1]
    details = [
        *_more(found, first, gradients),
        *loaded[len(ranks) == 1 :],
        *(f"{one}" for one in metrics if str(one) != parts[0]),
        *_advice(step, last_clean, is_exact, first),
        *(_earlier(recording, calls, cells, chosen) if last_clean is None and not some else []),
        *details,
        _looked_at(gradients, []),
    ]
    return FirstNan(
        cell=chosen,
        is_found=True,
        sentence=f"{where}: {'; '.join(parts)}",
        details=tuple(details),
        step=step,
        last_clean_step=last_clean,
        ranks=tuple(ranks),
        gradients=tuple(found),
        metrics=tuple(metrics),
    )


def cell_of_prompt(recording: RecordedTables, number: int) -> int:
    """Return the last cell with this number in its prompt that has training steps or logged numbers.

    A cell without a prompt, as in a script, has its recorded number.

    Raises:
        UsageError: there is no such cell.
    """
    cells = training_cells(recording, calls_of(recording))
    for cell in reversed(cells):
        prompt = prompt_of(recording, cell)
        if prompt.startswith(f"In [{number}]") or (not prompt and cell == number):
            return cell
    known = ", ".join(label_of(recording, cell) for cell in cells) or "none"
    raise UsageError(f"In [{number}] has no recorded training step and no logged number; cells with them: {known}")


def _argument_of(recording: RecordedTables, cell: int) -> str:
    """Return the argument of %ddp_nan for a cell: 7 for In [7]."""
    found = re.match(r"In \[(\d+)\]", prompt_of(recording, cell))
    return found[1] if found else str(cell)


def _without_gradients(
    cell: int, where: str, gradients: GradientInputs, names: Sequence[str], metrics: list[BadMetric], details: list[str]
) -> FirstNan:
    """Return the answer if no recorded gradient was bad to the end."""
    has_gradients = len(gradients.looked_at_steps) > 0
    bad = [one for one in metrics if one.was_finite and not has_gradients]
    notes = [f"{one}" for one in metrics if one not in bad[:1]]
    if bad:
        if gradients.steps:
            notes.append(f"the gradients were not recorded; to see which rank had them first: {_RECORD}")
        sentence = f"{where}: {bad[0]}{_gap(bad[0])}"
    elif has_gradients:
        last = int(gradients.looked_at_steps[-1])
        sentence = f"{where}: all recorded gradients were finite up to step {last:,}, the last one that was recorded"
        if gradients.steps and not metrics and not details:
            sentence = f"{where}: all that was recorded is finite"
    elif metrics:
        sentence = f"{where}: no gradient was recorded; {metrics[0]}, as all its values"
        notes = notes[1:]
    elif names:
        sentence = f"{where}: all logged numbers are finite; no gradient was recorded"
    else:
        sentence = f"{where}: nothing was recorded that shows whether values are finite; {_RECORD}"
    finite = [name for name in names if all(one.name != name for one in metrics)]
    return FirstNan(
        cell=cell,
        is_found=bool(bad),
        sentence=sentence,
        details=(*notes, *details, *filter(None, [_looked_at(gradients, finite)])),
        metrics=tuple(metrics),
    )


def _related(metrics: Sequence[BadMetric], last_clean: int | None) -> list[BadMetric]:
    """Return the metrics that were not finite from about the first bad gradient on, losses first.

    A number that was never finite, such as the initial value of a minimum, is not related.
    """
    related = [
        one
        for one in metrics
        if (one.was_finite or last_clean is None) and (one.is_given or last_clean is None or one.step >= last_clean)
    ]
    return sorted(related, key=lambda one: (one.step, "loss" not in one.name.lower()))


def _sent(first: Sequence[BadGradient], step: int, is_exact: bool, gradients: GradientInputs) -> str:
    """Return the part of the sentence about the gradients before their average."""
    ranks = [one.rank for one in first]
    every = len(gradients.ranks)
    whose = f"all {every} ranks" if len(ranks) == every > 1 else list_ranks(ranks)
    kind = kind_of(sum(one.nans for one in first), sum(one.infs for one in first))
    place = first[0].place
    when = f"in step {step:,}" if is_exact else f"in step {step:,}, the first bad one that was recorded,"
    each = "" if len({one.place for one in first}) == 1 else f" (rank {first[0].rank}'s first)"
    return f"{when} {whose} sent {kind} into {place}{each} before the average"


def _clean(step: int, last_clean: int | None, gradients: GradientInputs) -> str:
    if last_clean is not None:
        return f"step {last_clean:,} was clean"
    earlier = [one for one in gradients.looked_at_steps.tolist() if one < step]
    return "no earlier step was recorded" if step and not earlier else "no recorded step was clean"


def _loaded(recording: RecordedTables, cell: int, ranks: Sequence[int], step: int) -> list[str]:
    return list(filter(None, (loaded_samples(recording, cell, rank, step) for rank in ranks[:_MOST_RANKS])))


def _more(found: Sequence[BadGradient], first: Sequence[BadGradient], gradients: GradientInputs) -> list[str]:
    lines = []
    for one in first[:4]:
        before = gradients.finite_before(one.step, one.rank)
        others = sum(other.rank == one.rank for other in found) - 1
        parts = [f"rank {one.rank}: {bad_elements(one.nans, one.infs, one.looked_at)} of {one.place}"]
        if one.looked_at < one.numel:
            parts[0] += f", a sample of {one.numel:,}"
        if before:
            parts.append(f"{before} {'was' if before == 1 else 'were'} averaged earlier in this step and finite")
        if others:
            parts.append(f"{others} more {'was' if others == 1 else 'were'} not finite")
        lines.append("; ".join(parts))
    if len(first) > len(lines):
        lines.append(f"{len(first) - len(lines)} more ranks")
    return lines


def _advice(step: int, last_clean: int | None, is_exact: bool, first: Sequence[BadGradient]) -> list[str]:
    if is_exact:
        rank = "that rank" if len(first) == 1 else "each rank"
        return [f"%ddp_nan --catch stops the next cell at such a step and names the module of {rank}"]
    since = "the start of the cell" if last_clean is None else f"step {last_clean + 1:,}"
    return [
        f"the values may have become NaN or infinite anywhere from {since} to step {step:,}, since the gradients in "
        f"between were not recorded; to find the step and the rank: {_RECORD}, or %ddp_nan --catch"
    ]


def _earlier(recording: RecordedTables, calls: Mapping[str, Column], cells: Sequence[int], cell: int) -> list[str]:
    """Return a hint at an earlier cell, if its last gradients were not finite either."""
    for earlier in reversed([one for one in cells if one < cell]):
        before = GradientInputs(recording, calls, earlier)
        if len(before.looked_at_steps):
            is_bad = before.looked_at_steps[-1] in before.bad_steps
            name = label_of(recording, earlier)
            hint = f"%ddp_nan {_argument_of(recording, earlier)}"
            return [f"the gradients at the end of {name} were not finite either: {hint}"] if is_bad else []
    return []


def _passed(gradients: GradientInputs, steps: Sequence[int]) -> list[str]:
    if not steps:
        return []
    first = gradients.bad(steps[0], gradients.ranks_of(steps[0])[0]) if gradients.ranks_of(steps[0]) else []
    which = f", first on rank {first[0].rank} in {first[0].place}" if first else ""
    return [
        f"in {steps_in_words(steps)} gradients were not finite{which}, and later ones were finite: the program skipped "
        "or repaired them, as GradScaler does"
    ]


def _gap(metric: BadMetric) -> str:
    """Return the last finite value of the first ranks, if it is not that of the step before."""
    before = [metric.last_finite[rank] for rank in metric.ranks]
    known = [one for one in before if one is not None]
    if not known or max(known) == metric.step - 1:
        return ""
    return f"; the last finite value there was that of step {max(known):,}"


def _looked_at(gradients: GradientInputs, names: Sequence[str]) -> str:
    parts = [gradients.looked_at()] if len(gradients.looked_at_steps) else []
    if names:
        parts.append(f"the logged {listed(names)}")
    return f"looked at: {'; '.join(parts)}. Steps are counted from 0" if parts else ""
