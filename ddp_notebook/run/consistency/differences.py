"""Entries that differ between ranks: the value on each rank, and the size of the difference."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ddp_notebook.records.names import printable
from ddp_notebook.records.words import name_ranks
from ddp_notebook.run.consistency.compared_entries import MOST_NAMES, format_count, join_names, missing_on


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualRanks:
    """Ranks with an equal value of an entry."""

    ranks: tuple[int, ...]
    value: str | None  # value as text; None: the entry does not exist
    low: float | None = None  # minimum and maximum of a tensor without NaN
    high: float | None = None
    nan: int = 0  # number of NaN elements


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """Size of the difference between tensors."""

    largest: float  # largest |difference|
    scale: float  # largest finite |element|
    compared: int  # number of compared elements

    @property
    def relative(self) -> float:
        return self.largest / self.scale if self.scale else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """An entry that differs between ranks.

    Example:
        >>> session.push({"lr": 0.1})
        >>> session.push({"lr": 0.2}, ranks="1")
        >>> session.check("lr").differences[0]
        lr: 0.1 on rank 0, 0.2 on rank 1
    """

    entry: str
    kind: str
    parts: tuple[EqualRanks, ...]  # the part with the most ranks first
    elements: int = 0  # number of elements of a tensor with equal descriptions on all ranks
    amount: Amount | None = None

    @property
    def is_inside(self) -> bool:
        """Return whether the descriptions are equal and only the contents differ."""
        return len(self.parts) > 1 and len({part.value for part in self.parts}) == 1

    @property
    def is_nowhere(self) -> bool:
        """Return whether no rank has the entry."""
        return all(part.value is None for part in self.parts)

    @property
    def most(self) -> EqualRanks | None:
        """Return the part from which the others differ, or None if no part has more ranks than every other."""
        first, *others = self.parts
        return first if not others or len(first.ranks) > len(others[0].ranks) else None

    def __repr__(self) -> str:
        return printable(self._in_words())

    def _in_words(self) -> str:
        if self.is_inside:
            nan = ", ".join(f"{part.nan} NaN on {name_ranks(part.ranks)}" for part in self.parts if part.nan)
            return f"{self.entry}: {self._sides()}{self._by_how_much()}" + (f"; {nan}" if nan else "")
        there = [part for part in self.parts if part.value is not None]
        absent = [rank for part in self.parts if part.value is None for rank in part.ranks]
        if self.kind == "missing":
            return f"{self.entry} is not defined on {name_ranks(absent) if there else 'any rank'}"
        if len(there) == 1:
            is_rare = len(there[0].ranks) < len(absent)
            return f"{self.entry} is " + (f"on {name_ranks(there[0].ranks)} only" if is_rare else missing_on(absent))
        texts = [f"{part.value} on {name_ranks(part.ranks)}" for part in there[:MOST_NAMES]]
        if more := [rank for part in there[MOST_NAMES:] for rank in part.ranks]:
            texts.append(f"other values on {name_ranks(more)}")
        return f"{self.entry}: {', '.join(texts + [missing_on(absent)] * bool(absent))}"

    def _sides(self) -> str:
        names = [name_ranks(part.ranks) for part in self.parts]
        if self.most is None:
            is_each = len(names) > 2 and len(self.parts[0].ranks) == 1
            return f"all {len(names)} ranks differ" if is_each else f"{join_names(names)} differ"
        if len(names) > 2:
            return f"{join_names(names[1:])} differ from {names[0]} and from each other"
        return f"{names[1]} differ{'s' * (len(self.parts[1].ranks) == 1)} from {names[0]}"

    def _by_how_much(self) -> str:
        amount = self.amount
        if amount is None:
            return f" by {self.least:.2g} or more" if self.least else ""
        is_all = amount.compared >= self.elements
        sampled = "" if is_all else f"{amount.compared} of {format_count(self.elements)} elements compared"
        if amount.largest == 0:
            if any(part.nan for part in self.parts):
                return ""
            return " in bits only, such as 0.0 and -0.0" if is_all else f" in few elements: not in {sampled}"
        relative = f"relative {amount.relative:.1g}" if math.isfinite(amount.largest) else ""
        notes = "; ".join(filter(None, [relative, sampled]))
        by = f" by up to {amount.largest:.2g}" if is_all else f" by {amount.largest:.2g} or more"
        return by + (f" ({notes})" if notes else "")

    @property
    def least(self) -> float:
        """Return a lower bound of the largest difference, computed from minima and maxima."""
        known = [part for part in self.parts if part.low is not None and part.high is not None]
        if len(known) < len(self.parts):
            return 0.0
        return max(self.apart([part.low or 0.0 for part in known]), self.apart([part.high or 0.0 for part in known]))

    def apart(self, values: Sequence[float]) -> float:
        """Return the largest distance from the value of the part with the most ranks, or else between any two
        values.
        """
        if self.most is not None:
            return max(_distance(values[0], value) for value in values[1:])
        numbers = [value for value in values if not math.isnan(value)]
        return _distance(max(numbers), min(numbers)) if numbers else 0.0


def absence_of(
    variable: str, by_rank: Mapping[int, Mapping[str, Mapping[str, Any]]], holders: Sequence[int], absent: Sequence[int]
) -> Difference:
    """Return the difference of a variable that some ranks do not have."""
    facts = (by_rank[rank][variable] for rank in [*absent, *holders] if variable in by_rank[rank])  # "missing" first
    parts = [EqualRanks(ranks=tuple(absent), value=None)]
    if holders:
        parts.append(EqualRanks(ranks=tuple(holders), value=""))
    return Difference(entry=variable, kind=next(facts)["kind"], parts=_ordered(parts))


def difference_of(entry: str, facts: Mapping[int, Mapping[str, Any] | None]) -> Difference | None:
    """Return the difference of one entry between these ranks: in its description, else in its checksum. None: it is
    equal.
    """
    words = {rank: None if fact is None else fact["value"] for rank, fact in facts.items()}
    is_inside = len(set(words.values())) == 1
    groups: dict[str | None, list[int]] = {}
    for rank, fact in facts.items():
        groups.setdefault(fact.get("checksum") if is_inside and fact else words[rank], []).append(rank)
    if len(groups) < 2:
        return None
    parts = []
    for ranks in groups.values():
        numbers = {key: (facts[ranks[0]] or {}).get(key) for key in ("low", "high")} if is_inside else {}
        nan = (facts[ranks[0]] or {}).get("nan", 0) if is_inside else 0
        parts.append(EqualRanks(ranks=tuple(ranks), value=words[ranks[0]], nan=nan, **numbers))
    one = next(fact for fact in facts.values() if fact is not None)
    elements = one.get("elements", 0) if is_inside else 0
    return Difference(entry=entry, kind=one["kind"], parts=_ordered(parts), elements=elements)


def _ordered(parts: Iterable[EqualRanks]) -> tuple[EqualRanks, ...]:
    return tuple(sorted(parts, key=lambda part: (-len(part.ranks), part.ranks)))


def measured(difference: Difference, by_rank: Mapping[int, Mapping[str, Sequence[float]]]) -> Difference:
    """Return the difference with its size, if samples of every part exist."""
    columns = []
    for part in difference.parts:
        answers = (by_rank.get(rank, {}).get(difference.entry) for rank in part.ranks)
        columns.append(next((values for values in answers if values), ()))
    if not (difference.is_inside and all(columns)):
        return difference
    rows = list(zip(*columns, strict=False))
    largest = max(map(difference.apart, rows))
    if len(rows) < difference.elements:
        largest = max(largest, difference.least)
    scale = max((abs(value) for row in rows for value in row if math.isfinite(value)), default=0.0)
    return replace(difference, amount=Amount(largest=largest, scale=scale, compared=len(rows)))


def _distance(a: float, b: float) -> float:
    """Return |a - b|; 0 for equal infinities, and for NaN, which are counted separately."""
    return 0.0 if a == b or math.isnan(a) or math.isnan(b) else abs(a - b)
