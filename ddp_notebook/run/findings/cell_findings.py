"""Findings of the cells of a session: derived from the facts of all ranks, shown under a cell, kept for the report."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddp_notebook.observe.tables.matching import RowSource
from ddp_notebook.observe.tables.ring_buffer import select
from ddp_notebook.records.words import name_ranks
from ddp_notebook.run.cells.cell import CellRun
from ddp_notebook.run.findings.random_numbers import same_draws
from ddp_notebook.run.findings.rank_comparison import compared, shared_inputs
from ddp_notebook.run.findings.sentences import SENTENCES
from ddp_notebook.run.session_hooks import SessionFeature

_MOST_LINES = 3  # under a cell; the report has all
# Findings that explain why ranks train apart. "idle" is a cell without gradients, which trains nothing; "communicates"
# is one in which gradients may have been averaged, and "sharded" one in which each rank trains its own part.
_WITHOUT_AVERAGE = {
    *(
        "communicates",
        "ddp-bypassed",
        "unreduced",
        "idle",
        "loss-without-path",
        "no-gradient",
        "optimizer-of-another-model",
        "partial-output",
        "sharded",
        "trains-apart",
    ),
}


class CellFindings(SessionFeature):
    """Shows findings under cells, and keeps them for the report."""

    def cell_ended(self, run: CellRun, code: str) -> Sequence[str]:
        results, silenced = run.result.by_rank, silenced_by(code)
        if "trains-apart" in silenced:
            for one in results.values():
                one.trains_apart = ""
        facts: dict[int, list[Any]] = {rank: one.findings for rank, one in results.items() if one.findings}
        if not facts:
            return ()
        for rank, own in facts.items():
            if results[rank].status != "ok":  # the error may have come before the wait
                facts[rank] = [fact for fact in own if fact[0] != "never-waited"]
            if _WITHOUT_AVERAGE & {name for name, *_ in own}:  # the finding has the cause
                results[rank].trains_apart = ""
        if (common := _common_step(facts, sorted(results))) is not None and self._recordings is not None:
            step, was_finite = common
            facts = _with_bucket(facts, self._recordings.now, run.number, step, was_finite=was_finite)
        found = [one for one in findings_of(facts, sorted(results)) if one.name not in silenced]
        self._keep(run.number, found)
        self._keep_for_head(run.number, facts)
        if self._recordings is not None and any(name == "out-of-memory" for own in facts.values() for name, *_ in own):
            from ddp_notebook.run.sharding.out_of_memory import keep

            keep(self._recordings.now, run.number, facts)
        return [] if self.parts.options.quiet_findings else _lines(found)

    @property
    def _recordings(self) -> Any:
        return self.parts.hooks.features.get("recording")

    def _keep(self, cell: int, found: Sequence[Finding]) -> None:
        if (recordings := self._recordings) is not None:
            recordings.observer.recording.findings[cell] = tuple(str(one) for one in found)

    def _keep_for_head(self, cell: int, facts: Mapping[int, Sequence[Sequence[Any]]]) -> None:
        """Keep data for the head of the report: ranks with the same inputs, and with the same random numbers."""
        if (recordings := self._recordings) is None:
            return
        recording = recordings.observer.recording
        if (shared := shared_inputs(_by_rank(facts, "batches"))) != []:
            recording.same_inputs[cell] = shared or []
        if drawn := same_draws(_by_rank(facts, "random")):
            recording.same_draws[cell] = drawn


def _lines(found: Sequence[Finding]) -> list[str]:
    lines = [str(one) for one in found[:_MOST_LINES]]
    if len(found) > _MOST_LINES:
        lines.append(f"{len(found) - _MOST_LINES} more in %ddp_report")
    return lines


def _by_rank(facts: Mapping[int, Sequence[Sequence[Any]]], name: str) -> dict[int, tuple[int, dict[str, Any]]]:
    """Return the step and the details of the fact with this name, by rank."""
    return {rank: (step, details) for rank, own in facts.items() for its, step, details in own if its == name}


_COMMENT = re.compile(r"#\s*ddp:\s*ok\s+([a-z-]+(?:\s*,\s*[a-z-]+)*)")


def silenced_by(code: str) -> set[str]:
    """Return the names of the findings that comments in a cell silence.

    Example:
        >>> sorted(silenced_by("step()  # ddp: ok same-batches, same-epoch"))
        ['same-batches', 'same-epoch']
    """
    return {name for found in _COMMENT.findall(code) for name in re.split(r"\s*,\s*", found)}


# ---- from facts to findings


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding: its name, the ranks for which it holds, the first step, and the sentence with cause and fix.

    `ranks` is empty if it holds for all ranks of the cell.
    """

    name: str
    ranks: tuple[int, ...]
    steps: str
    sentence: str

    def __str__(self) -> str:
        where = f"{name_ranks(self.ranks)}, {self.steps}" if self.ranks else self.steps
        return f"{where}: {self.sentence} (# ddp: ok {self.name})"


def findings_of(facts: Mapping[int, Sequence[Sequence[Any]]], ranks: Sequence[int]) -> list[Finding]:
    """Return the findings of a cell, the most important ones first.

    Args:
        facts: facts of each rank: name, step and details.
        ranks: ranks of the cell.

    Example:
        >>> facts = {0: [["same-epoch", 9, {"epoch": 0}]], 1: [["same-epoch", 9, {"epoch": 0}]]}
        >>> print(findings_of(facts, [0, 1])[0])  # doctest: +ELLIPSIS
        step 8: another pass over the data has the order of the last one, ... (# ddp: ok same-epoch)
    """
    by_name: dict[str, dict[int, tuple[int, dict[str, Any]]]] = {}
    for rank, own in sorted(facts.items()):
        for name, step, details in own:
            by_name.setdefault(name, {})[rank] = step, details
    by_name = {**by_name, **compared(by_name)}
    found = []
    for name, sentence in SENTENCES.items():
        if (of_ranks := by_name.get(name)) is not None:
            first, some = _first_step(of_ranks)
            if list(some) != list(ranks) and any(of_ranks[rank][1].get("is_sharded") for rank in some):
                continue  # shards of other ranks have changed, or may have
            steps, text = sentence(first, {rank: of_ranks[rank][1] for rank in some})
            is_of_all = list(some) == list(ranks) or name in _NAMES_RANKS
            found.append(Finding(name, () if is_of_all else tuple(some), steps, text))
    return found


_NAMES_RANKS = {
    "clipped-shards",
    "mixed-samplers",
    "mixed-values",
    "same-batches",
    "skipped-batch",
}  # their sentences name the ranks
_BY_RANK = {"names", "batch", "line", "value"}  # details that may differ between the ranks of one finding


def _first_step(of_ranks: Mapping[int, tuple[int, dict[str, Any]]]) -> tuple[int, list[int]]:
    """Return the first step, and the ranks with this step and the same details."""
    step = min(one for one, _ in of_ranks.values())
    keys = {rank: _key(details) for rank, (one, details) in of_ranks.items() if one == step}
    key = next(iter(keys.values()))
    return step, [rank for rank, one in keys.items() if one == key]


def _key(details: Mapping[str, Any]) -> str:
    return json.dumps({name: value for name, value in details.items() if name not in _BY_RANK}, sort_keys=True)


# ---- gradients that were not finite, from the recording

_NOT_FINITE = "not-finite"
_OWN = 0  # side of a value: the input of a call


def _common_step(facts: Mapping[int, Sequence[Sequence[Any]]], ranks: Sequence[int]) -> tuple[int, bool] | None:
    """Return the first step with such losses, and whether the parameters were finite before it. Gradients may have the
    cause.

    Returns None if it is not the same step on all ranks.
    """
    found = {
        rank: (step, one["was_finite"]) for rank, own in facts.items() for name, step, one in own if name == _NOT_FINITE
    }
    is_common = len(ranks) > 1 and set(found) == set(ranks) and len(set(found.values())) == 1
    return next(iter(found.values())) if is_common else None


def _with_bucket(
    facts: Mapping[int, Sequence[Sequence[Any]]], recording: RowSource, cell: int, step: int, *, was_finite: bool
) -> dict[int, list[Sequence[Any]]]:
    """Return the facts with the buckets that were not finite, in the step that has changed the parameters, if they were
    recorded.

    Args:
        step: the first step with such losses on all ranks.
        was_finite: the parameters were finite before it. Otherwise the step before has changed them.
    """
    at = step if was_finite else step - 1
    found = _not_finite_buckets(recording, cell, at)
    changed: dict[int, list[Sequence[Any]]] = {}
    for rank, own in facts.items():
        changed[rank] = [one for one in own if one[0] != _NOT_FINITE]
        if not found:
            changed[rank].append([_NOT_FINITE, step, {"everywhere": True, "was_finite": was_finite}])
        elif rank in found:
            model, bucket = found[rank]
            changed[rank].append([_NOT_FINITE, at, {"model": model, "bucket": bucket}])
    return changed


def _not_finite_buckets(recording: RowSource, cell: int, step: int) -> dict[int, tuple[str, int]]:
    """Return the model and first bucket of each rank that had such a gradient in a step, counted from 1."""
    calls, values = recording.rows("call"), recording.rows("value")
    calls = select(calls, (calls["cell"] == cell) & (calls["bucket"] >= 0) & (calls["step"] == step - 1))
    values = select(values, (values["side"] == _OWN) & (values["nans"] + values["infs"] > 0))
    keys = {(int(rank), int(call)) for rank, call in zip(values["rank"], values["call"], strict=True)}
    found: dict[int, tuple[str, int]] = {}
    for one in calls:
        if (int(one["rank"]), int(one["call"])) in keys:
            found.setdefault(int(one["rank"]), (recording.text(int(one["module"])), int(one["bucket"])))
    return found
