"""The comparison of two training runs: sentences first, then numbers; also as JSON and as an HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ddp_notebook.errors import UsageError
from ddp_notebook.observe.compare.calls import CallChange, calls
from ddp_notebook.observe.compare.numbers import NumberChange, Numbers, numbers
from ddp_notebook.observe.compare.samples import Samples, samples
from ddp_notebook.observe.compare.settings import MemoryChange, Setting, memory, settings
from ddp_notebook.observe.compare.sides import FEWEST_STEPS, Side, cells_with_steps, side
from ddp_notebook.observe.compare.times import PARTS, PartChange, TimeChange, times
from ddp_notebook.observe.steps.run import TrainingRun
from ddp_notebook.observe.views import WARM_UP
from ddp_notebook.records.names import printable
from ddp_notebook.records.words import list_ranks

if TYPE_CHECKING:
    import os
    from pathlib import Path

    from ddp_notebook.observe.tables.recorded import RecordedTables

_MOST_RANKS = 8  # a table lists the ranks with the largest changes up to this number
_MOST_LINES = 10
_RECORD = 20  # steps after which a comparison of times is meaningful


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Comparison:
    """Changes from training run A to training run B. As text it is the output of `%ddp_diff`."""

    labels: tuple[str, str]
    runs: tuple[TrainingRun, TrainingRun]
    time: TimeChange
    settings: tuple[Setting, ...]
    calls: tuple[CallChange, ...]
    memory: tuple[MemoryChange, ...]
    numbers: Numbers
    samples: Samples
    notes: tuple[str, ...]  # sentences about the evidence
    is_backward: bool = False  # both runs are in one recording, and B ran before A

    @property
    def is_found(self) -> bool:
        """Return whether anything differs beyond noise: times, calls, memory, settings or numbers."""
        return bool(
            self.time.is_found
            or self.time.found
            or self.settings
            or self.calls
            or self.memory
            or self.numbers.is_found
            or self.samples.is_found
        )

    def exceeds(self, share: float) -> bool:
        """Return whether B is slower than A by more than a share (0.1 is 10 %), and by more than the noise."""
        return self.time.is_found and self.time.share > share

    @property
    def direction(self) -> str:
        """Return which run is the base, as one sentence without its full stop."""
        first, second = self.labels
        which = ", an earlier run" if self.is_backward else ""
        return f"Changes from A, the base ({first}), to B ({second}{which})"

    @property
    def input_sentences(self) -> tuple[str, ...]:
        """Return the sentence about the loaded samples, if these or numbers differ. Equal samples rule out a cause."""
        return (self.samples.sentence,) if self.samples.is_found or self.numbers.is_found else ()

    def __repr__(self) -> str:
        return f"<Comparison of {self.labels[0]} and {self.labels[1]}: {self.time.sentence}>"

    def __str__(self) -> str:
        first, second = self.labels
        lines = [
            f"{printable(self.direction)}.",
            f"A: {printable(first)}, {self.runs[0].counted} on {_ranks(self.runs[0])}, {self.runs[0].per_step}",
            f"B: {printable(second)}, {self.runs[1].counted} on {_ranks(self.runs[1])}, {self.runs[1].per_step}",
            "",
            f"Time: {self.time.sentence}.",
            f"Numbers: {self.numbers.sentence}.",
            *(f"Input: {one}." for one in self.input_sentences),
            *(f"{note}." for note in (*self.notes, *self.time.notes)),
        ]
        if rows := self.table():
            lines += ["", *_in_columns(rows)]
        for title, found in self.lists():
            lines += ["", f"{title}:", *(f"- {text}" for text in found[:_MOST_LINES])]
            if len(found) > _MOST_LINES:
                lines.append(f"- and {len(found) - _MOST_LINES} more")
        return "\n".join(lines)

    def table(self) -> list[list[str]]:
        """Return the parts of a step that changed beyond noise, by size: a row for each part, direction and ranks."""
        rows = [["changed part", "ranks", "A ms", "B ms", "change", "noise"]]
        for part, same in _grouped(self.time.found):
            before, after = (float(np.mean([getattr(one, name) for one in same])) for name in ("before_ns", "after_ns"))
            noise = float(np.mean([one.noise_ns for one in same]))
            ranks = list_ranks(sorted(one.rank for one in same)).partition(" ")[2]
            numbers_of = (f"{before / 1e6:.1f}", f"{after / 1e6:.1f}", f"{(after - before) / 1e6:+.1f}")
            rows.append([part, ranks, *numbers_of, f"{noise / 1e6:.1f}"])
        return rows if len(rows) > 1 else []

    def ranks_table(self) -> list[list[str]]:
        """Return the change of each part on every rank, in ms: a row for each rank."""
        shown = [part for part in PARTS if any(one.part == part and one.change_ns for one in self.time.parts)]
        by_rank: dict[int, dict[str, PartChange]] = {}
        for one in self.time.parts:
            by_rank.setdefault(one.rank, {})[one.part] = one
        rows = [["rank", *shown]]
        for rank, parts in sorted(by_rank.items()):
            rows.append([str(rank), *(f"{parts[part].change_ns / 1e6:+.1f}" for part in shown)])
        return rows

    def lists(self) -> list[tuple[str, list[str]]]:
        """Return the other changes: a title, and a text for each change."""
        found: list[tuple[str, Sequence[object]]] = [
            ("Settings", self.settings),
            ("Collectives", self.calls),
            ("Memory", self.memory),
            ("Later first differences", self.numbers.others),
            ("Logged values that differ, while all compared tensors or losses are equal", self.numbers.apart),
        ]
        return [(title, [printable(str(one)) for one in ones]) for title, ones in found if ones]

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as JSON values: times in nanoseconds, null for a noise that could not be measured."""
        return {
            "direction": self.direction,
            "a": {"label": self.labels[0], **self.runs[0].to_json()},
            "b": {"label": self.labels[1], **self.runs[1].to_json()},
            "time": {
                "sentence": self.time.sentence,
                "is_found": self.time.is_found,
                "before_ns": self.time.before_ns,
                "after_ns": self.time.after_ns,
                "share": self.time.share,
                "noise_ns": _finite(self.time.noise_ns),
                "cause": self.time.cause,
                "explained_ns": self.time.explained_ns,
                "parts": [
                    {
                        "rank": one.rank,
                        "part": one.part,
                        "before_ns": one.before_ns,
                        "after_ns": one.after_ns,
                        "noise_ns": _finite(one.noise_ns),
                        "is_found": one.is_found,
                    }
                    for one in self.time.parts
                ],
            },
            "settings": [{"name": one.name, "before": one.before, "after": one.after} for one in self.settings],
            "calls": [
                {
                    "op": one.op,
                    "group": one.group,
                    "site": one.site,
                    "kind": one.kind,
                    "before": one.before,
                    "after": one.after,
                    "nbytes": one.nbytes,
                }
                for one in self.calls
            ],
            "memory": [
                {"ranks": list(one.ranks), "kind": one.kind, "before": one.before, "after": one.after}
                for one in self.memory
            ],
            "numbers": {
                "sentence": self.numbers.sentence,
                "is_found": self.numbers.is_found,
                "tensors": self.numbers.tensors,
                "metrics": self.numbers.metrics,
                "first": None if self.numbers.first is None else _number(self.numbers.first),
                "others": [_number(one) for one in self.numbers.others],
                "apart": [_number(one) for one in self.numbers.apart],
            },
            "samples": {
                "sentence": self.samples.sentence,
                "is_found": self.samples.is_found,
                "compared": self.samples.compared,
                "step": self.samples.step,
                "loader": self.samples.loader,
                "ranks": list(self.samples.ranks),
            },
            "notes": [*self.notes, *self.time.notes],
        }

    def save_html(self, path: str | os.PathLike[str]) -> Path:
        """Write the comparison as an HTML page without scripts, and return its path.

        Raises:
            UsageError: the folder does not exist.
        """
        from ddp_notebook.observe.compare import page

        return page.save(self, path)


def compare(
    a: RecordedTables,
    b: RecordedTables,
    cells: tuple[int | None, int | None] = (None, None),
    sources: tuple[str, str] = ("", ""),
) -> Comparison:
    """Compare two training runs.

    Args:
        a, b: the recordings; they may be the same.
        cells: number of the cell in each; None: the last one with optimizer steps.
        sources: name of the file or folder of each; "": the recording of this session.

    Raises:
        UsageError: a recording has no such training run.

    Example:
        >>> from ddp_notebook.widgets import simulate
        >>> recording = simulate(world_size=4)
        >>> print(compare(recording, recording, (1, 2)).time.sentence)
        B is 7... ms slower than A per step (A: 39... ms, B: 46... ms, +19 %), because the forward of rank 2 takes \
18... ms instead of 10... ms
    """
    first, second = (side(one, cell, name) for one, cell, name in zip((a, b), cells, sources, strict=True))
    return Comparison(
        labels=(first.label, second.label),
        runs=(first.run, second.run),
        time=times(first, second),
        settings=settings(first, second),
        calls=calls(first, second),
        memory=memory(first, second),
        numbers=numbers(first, second),
        samples=samples(first, second),
        notes=(*_thin(first, "A"), *_thin(second, "B"), *_lost(a, b), *_other_ranks(first, second)),
        is_backward=a is b and second.run.cell < first.run.cell,
    )


def compare_with(
    recording: RecordedTables, other: RecordedTables | None, cell: int | None, other_cell: int | None
) -> Comparison:
    """Compare a run of a recording with one of another. See `Recording.compare`."""
    if other is not None:
        return compare(recording, other, (cell, other_cell), ("", "" if other is recording else "the other recording"))
    cells = cells_with_steps(recording)
    other_cell = cells[-1] if other_cell is None and cells else other_cell
    earlier = [one for one in cells if other_cell is None or one < other_cell]
    if cell is None and not earlier:
        raise UsageError("compare() needs two training runs, but the recording has no earlier one: pass other=")
    return compare(recording, recording, (earlier[-1] if cell is None else cell, other_cell))


def _thin(one: Side, name: str) -> tuple[str, ...]:
    if not one.is_thin:
        return ()
    count = len(np.unique(one.every.number[one.every.number >= WARM_UP]))
    return (
        f"{name} has {count} step{'s' * (count != 1)} after the first {WARM_UP}: times are compared from "
        f"{FEWEST_STEPS} on in the mean, so record at least {_RECORD} steps",
    )


def _lost(a: RecordedTables, b: RecordedTables) -> tuple[str, ...]:
    lost = sum(sum(one.dropped.values()) for one in ([a] if a is b else [a, b]))
    return (f"{lost:,} rows were lost: some steps may be missing",) if lost else ()


def _other_ranks(a: Side, b: Side) -> tuple[str, ...]:
    if a.run.ranks == b.run.ranks:
        return ()
    return (
        "With another number of ranks, parts of the batch and averages differ in a right program too: only inputs of "
        "collectives are compared",
    )


def _ranks(run: TrainingRun) -> str:
    return f"{run.ranks} rank{'s' * (run.ranks != 1)}"


def _grouped(found: Sequence[PartChange]) -> list[tuple[str, list[PartChange]]]:
    """Group changes of the same part with a similar size, the largest first."""
    groups: list[tuple[str, list[PartChange]]] = []
    for one in found:
        for part, same in groups:
            if part == one.part and 0.5 <= one.change_ns / same[0].change_ns <= 1:
                same.append(one)
                break
        else:
            groups.append((one.part, [one]))
    return groups


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


def _number(one: NumberChange) -> dict[str, Any]:
    return {
        "sentence": str(one),
        "kind": one.kind,
        "name": one.name,
        "detail": one.detail,
        "step": one.step,
        "ranks": list(one.ranks),
        "before": _json(one.before),
        "after": _json(one.after),
        "what": one.what,
        "share": _json(one.share),
        "last_step": one.last_step,
        "last_share": _json(one.last_share),
        "clean_step": one.clean_step,
        "only_result": one.only_result,
    }


def _json(value: float) -> float | str:
    """Return a number for JSON, which has no NaN and no infinity."""
    return value if np.isfinite(value) else str(value)


def _in_columns(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    lines = []
    for line in table:
        words = [line[at].ljust(widths[at]) if at < 2 else line[at].rjust(widths[at]) for at in range(len(line))]
        lines.append("  ".join(words).rstrip())
    return lines
