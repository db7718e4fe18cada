"""Derive findings from the facts of all ranks of a cell."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddp_notebook.records.words import name_ranks
from ddp_notebook.run.findings.compare import compared
from ddp_notebook.run.findings.sentences import SENTENCES


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
        step 9: another pass over the data has the order of the last one, ... (# ddp: ok same-epoch)
    """
    by_name: dict[str, dict[int, tuple[int, dict[str, Any]]]] = {}
    for rank, own in sorted(facts.items()):
        for name, step, details in own:
            by_name.setdefault(name, {})[rank] = step, details
    by_name = {**by_name, **compared(by_name)}
    found = []
    for name, sentence in SENTENCES.items():
        if (of_ranks := by_name.get(name)) is not None:
            first, some = _first(of_ranks)
            steps, text = sentence(first, {rank: of_ranks[rank][1] for rank in some})
            is_of_all = list(some) == list(ranks) or name in _NAMES_RANKS
            found.append(Finding(name, () if is_of_all else tuple(some), steps, text))
    return found


_NAMES_RANKS = {"same-batches", "skipped-batch"}  # their sentences name the ranks
_BY_RANK = {"names", "batch"}  # details that may differ between the ranks of one finding


def _first(of_ranks: Mapping[int, tuple[int, dict[str, Any]]]) -> tuple[int, list[int]]:
    """Return the first step, and the ranks with this step and the same details."""
    step = min(one for one, _ in of_ranks.values())
    keys = {rank: _key(details) for rank, (one, details) in of_ranks.items() if one == step}
    key = next(iter(keys.values()))
    return step, [rank for rank, one in keys.items() if one == key]


def _key(details: Mapping[str, Any]) -> str:
    return json.dumps({name: value for name, value in details.items() if name not in _BY_RANK}, sort_keys=True)
