"""Whether ranks hold the same: what they said about their variables, side by side."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ddp_notebook.records.words import list_ranks, name_ranks

_MOST_SHOWN = 12  # entries that differ
_MOST_NAMES = 6  # values of one entry, or names in one line
_UNITS = ((10**9, "G"), (10**6, "M"), (10**3, "k"))
_WORDS = {
    "parameter": ("parameter", "parameters"),
    "buffer": ("buffer", "buffers"),
    "optimizer": ("optimizer entry", "optimizer entries"),
    "scheduler": ("scheduler entry", "scheduler entries"),
    "scaler": ("scaler entry", "scaler entries"),
}
_TOPICS = {"data": "data length", "version": "versions", "setting": "settings"}  # that are not counted
_OF_PROCESS = ("version", "setting", "random")
_BUFFERS_HINT = (
    "buffers: DistributedDataParallel gives all ranks the buffers of rank 0 as a forward pass begins, not after it"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The ranks on which an entry is the same."""

    ranks: tuple[int, ...]
    value: str | None  # in words; None: there is no such entry
    low: float | None = None  # least and greatest element of a tensor without NaN
    high: float | None = None
    nan: int = 0  # how many elements are NaN


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """By how much the elements of a tensor differ."""

    largest: float  # |difference|
    scale: float  # largest finite |element|
    compared: int  # elements

    @property
    def relative(self) -> float:
        return self.largest / self.scale if self.scale else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """An entry that is not the same on all ranks.

    Example:
        >>> agreement.differences[0]
        model.fc.weight: rank 2 differs from ranks 0-1,3 by up to 0.00031 (relative 0.002)
    """

    entry: str
    kind: str
    parts: tuple[Part, ...]  # the one with the most ranks first
    elements: int = 0  # of a tensor that is described in the same words everywhere
    amount: Amount | None = None

    @property
    def is_inside(self) -> bool:
        """Whether it is described in the same words everywhere, and differs in what is inside."""
        return len(self.parts) > 1 and len({part.value for part in self.parts}) == 1

    @property
    def most(self) -> Part | None:
        """The part from which the others differ. None: no part has more ranks than any other."""
        first, *others = self.parts
        return first if not others or len(first.ranks) > len(others[0].ranks) else None

    def __repr__(self) -> str:
        if self.is_inside:
            nan = ", ".join(f"{part.nan} NaN on {name_ranks(part.ranks)}" for part in self.parts if part.nan)
            return f"{self.entry}: {self._sides()}{self._by_how_much()}" + (f"; {nan}" if nan else "")
        there = [part for part in self.parts if part.value is not None]
        absent = [rank for part in self.parts if part.value is None for rank in part.ranks]
        if self.kind == "missing":
            return f"{self.entry} is not defined on {name_ranks(absent) if there else 'any rank'}"
        if len(there) == 1:
            is_rare = len(there[0].ranks) < len(absent)
            return f"{self.entry} is " + (f"on {name_ranks(there[0].ranks)} only" if is_rare else _missing(absent))
        texts = [f"{part.value} on {name_ranks(part.ranks)}" for part in there[:_MOST_NAMES]]
        if more := [rank for part in there[_MOST_NAMES:] for rank in part.ranks]:
            texts.append(f"other values on {name_ranks(more)}")
        return f"{self.entry}: {', '.join(texts + [_missing(absent)] * bool(absent))}"

    def _sides(self) -> str:
        names = [name_ranks(part.ranks) for part in self.parts]
        if self.most is None:
            is_each = len(names) > 2 and len(self.parts[0].ranks) == 1
            return f"all {len(names)} ranks differ" if is_each else f"{_and(names)} differ"
        if len(names) > 2:
            return f"{_and(names[1:])} differ from {names[0]} and from each other"
        return f"{names[1]} differ{'s' * (len(self.parts[1].ranks) == 1)} from {names[0]}"

    def _by_how_much(self) -> str:
        amount = self.amount
        if amount is None:
            return f" by {self.least:.2g} or more" if self.least else ""
        is_all = amount.compared >= self.elements
        sampled = "" if is_all else f"{amount.compared} of {_count(self.elements)} elements compared"
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
        """What elements differ by at least: the bounds of a tensor cannot be further apart than its elements."""
        known = [part for part in self.parts if part.low is not None and part.high is not None]
        if len(known) < len(self.parts):
            return 0.0
        return max(self.apart([part.low or 0.0 for part in known]), self.apart([part.high or 0.0 for part in known]))

    def apart(self, values: Sequence[float]) -> float:
        """How far the parts' values are from that of the most ranks; from each other, if there is none."""
        if self.most is not None:
            return max(_distance(values[0], value) for value in values[1:])
        numbers = [value for value in values if not math.isnan(value)]
        return _distance(max(numbers), min(numbers)) if numbers else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What ranks agree on, and what not. Its `repr` is what `%ddp_check` shows.

    Example:
        >>> compare({rank: fingerprints(namespace) for rank, namespace in enumerate(namespaces)})
        4 ranks agree: 62 parameters, 4 buffers (11.2 M elements), data length, versions, settings; random state
        differs (as it should where ranks draw their own)
    """

    ranks: tuple[int, ...]
    differences: tuple[Difference, ...] = ()
    compared: int = 0  # entries
    same: str = ""  # what they agree on
    notes: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()  # why they may differ

    @property
    def agrees(self) -> bool:
        return not self.differences

    def without(self, busy: Sequence[int], gone: Sequence[int]) -> Agreement:
        """The same, and who was not asked: ranks that are in a cell, and ranks that have died."""
        reasons = (("in a cell", busy), ("without a process", gone))
        notes = [
            f"{list_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} {why}: not asked"
            for why, ranks in reasons
            if ranks
        ]
        return replace(self, notes=(*self.notes, *notes))

    @property
    def differing_entries(self) -> tuple[str, ...]:
        """The tensors whose elements are worth asking for: their elements differ, and they are shown."""
        shown = (difference for ones, _ in self._shown().values() for difference in ones)
        return tuple(one.entry for one in shown if one.is_inside and one.elements)

    def with_samples(self, by_rank: Mapping[int, Mapping[str, Sequence[float]]]) -> Agreement:
        """The same, and by how much elements differ.

        Args:
            by_rank: what `rank.variables.check.samples` gave for `differing_entries`, of one rank of each part or of
                all.
        """
        return replace(self, differences=tuple(_measured(one, by_rank) for one in self.differences))

    def __repr__(self) -> str:
        n = len(self.ranks)
        if n < 2:
            return "1 rank: nothing to compare" if n else "no ranks: nothing to compare"
        if self.agrees:
            return "; ".join([f"{n} ranks agree: {self.same}", *self.notes])
        lines = [f"{n} ranks differ in {len(self.differences)} of {self.compared} entries:"]
        left_out: list[str] = []
        for name, (shown, more) in self._shown().items():
            lines += [f"  {difference}" for difference in shown]
            if shown and more:
                lines.append(f"  ... and {more} more of {name}")
            elif more:
                left_out.append(name)
        if left_out:
            lines.append(f"  ... and of {_names(left_out)}")
        lines += [f"  {hint}" for hint in self.hints]
        rest = [f"the rest agrees: {self.same}"] if self.same else []
        return "\n".join([*lines, "; ".join([*rest, *self.notes])]).rstrip()

    def _shown(self) -> dict[str, tuple[list[Difference], int]]:
        """By variable: the differences that are shown, a few of each, and how many are not."""
        of: dict[str, list[Difference]] = {}
        for difference in self.differences:
            of.setdefault(_variable(difference.entry), []).append(difference)
        limits, left = dict.fromkeys(of, 0), _MOST_SHOWN
        while left and (names := [name for name in of if limits[name] < len(of[name])]):
            for name in names[:left]:
                limits[name] += 1
                left -= 1
        return {name: (ones[: limits[name]], len(ones) - limits[name]) for name, ones in of.items()}


def compare(by_rank: Mapping[int, Mapping[str, Mapping[str, Any]]]) -> Agreement:
    """Compare what `rank.variables.check.fingerprints` said on each rank.

    Args:
        by_rank: its answers, of the ranks that gave one.
    """
    ranks = sorted(by_rank)
    by_variable: dict[str, list[str]] = {}
    for entry in dict.fromkeys(entry for rank in ranks for entry in by_rank[rank]):
        by_variable.setdefault(_variable(entry), []).append(entry)
    differences: list[Difference] = []
    same: dict[str, Mapping[str, Any]] = {}
    for variable, entries in by_variable.items():
        holders = [rank for rank in ranks if any(_is_there(by_rank[rank].get(entry)) for entry in entries)]
        if absent := [rank for rank in ranks if rank not in holders]:
            differences.append(_absence(variable, by_rank, holders, absent))
        whole = _difference(variable, {rank: by_rank[rank].get(variable) for rank in holders})
        if whole is not None:  # what is a model here and None there differs once, not once per parameter
            holders = [rank for rank in holders if any(e != variable and e in by_rank[rank] for e in entries)]
            differences.append(whole)
        for entry in [entry for entry in entries if holders and (entry != variable or whole is None)]:
            facts = {rank: by_rank[rank].get(entry) for rank in holders}
            if (difference := _difference(entry, facts)) is not None:
                differences.append(difference)
            else:
                same[entry] = next(fact for fact in facts.values() if fact is not None)
    real = tuple(one for one in differences if one.kind != "random")
    notes = _notes(same)
    if not {fact["kind"] for facts in by_rank.values() for fact in facts.values()} - {*_OF_PROCESS}:
        notes.append("there are no modules, optimizers or data")
    notes += _random_notes(differences, same)
    with_buffers = {_variable(one.entry) for one in real if one.kind == "buffer"}
    words = {by_rank[rank].get(variable, {}).get("value", "") for variable in with_buffers for rank in ranks}
    hints = (_BUFFERS_HINT,) if any("DistributedDataParallel" in word for word in words) else ()
    compared = len(real) + sum(fact["kind"] != "random" for fact in same.values())
    return Agreement(
        ranks=tuple(ranks),
        differences=real,
        compared=compared,
        same=_summary(same),
        notes=tuple(notes),
        hints=hints,
    )


def _is_there(fact: Mapping[str, Any] | None) -> bool:
    return fact is not None and fact["kind"] != "missing"


def _absence(
    variable: str, by_rank: Mapping[int, Mapping[str, Mapping[str, Any]]], holders: Sequence[int], absent: Sequence[int]
) -> Difference:
    facts = (by_rank[rank][variable] for rank in [*absent, *holders] if variable in by_rank[rank])  # "missing" first
    parts = [Part(ranks=tuple(absent), value=None)]
    if holders:
        parts.append(Part(ranks=tuple(holders), value=""))
    return Difference(entry=variable, kind=next(facts)["kind"], parts=_ordered(parts))


def _difference(entry: str, facts: Mapping[int, Mapping[str, Any] | None]) -> Difference | None:
    """How one entry differs on these ranks: in what is said about it, or else in its checksum."""
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
        parts.append(Part(ranks=tuple(ranks), value=words[ranks[0]], nan=nan, **numbers))
    one = next(fact for fact in facts.values() if fact is not None)
    elements = one.get("elements", 0) if is_inside else 0
    return Difference(entry=entry, kind=one["kind"], parts=_ordered(parts), elements=elements)


def _ordered(parts: Iterable[Part]) -> tuple[Part, ...]:
    return tuple(sorted(parts, key=lambda part: (-len(part.ranks), part.ranks)))


def _measured(difference: Difference, by_rank: Mapping[int, Mapping[str, Sequence[float]]]) -> Difference:
    """With its amount, if there are samples of every part."""
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
    """0 between equal infinities, and where one is NaN, of which there are other words."""
    return 0.0 if a == b or math.isnan(a) or math.isnan(b) else abs(a - b)


# ---- in words


def _summary(same: Mapping[str, Mapping[str, Any]]) -> str:
    """What agrees: `"62 parameters, 4 buffers (11.2 M elements), data length, versions"`."""
    kinds = Counter(fact["kind"] for fact in same.values())
    texts = []
    if own := list(dict.fromkeys(_variable(entry) for entry, fact in same.items() if fact["kind"] == "variable")):
        texts.append(_names(own) + (f" ({kinds['variable']} entries)" if kinds["variable"] > len(own) else ""))
    for kind, (singular, plural) in _WORDS.items():
        if kinds[kind]:
            texts.append(f"{kinds[kind]} {singular if kinds[kind] == 1 else plural}")
        if kind == "buffer" and (kinds["parameter"] or kinds["buffer"]):
            elements = sum(f.get("elements", 0) for f in same.values() if f["kind"] in ("parameter", "buffer"))
            texts[-1] += f" ({_count(elements)} elements)"
    texts += [topic for kind, topic in _TOPICS.items() if kinds[kind]]
    return ", ".join(texts) or _names(list(dict.fromkeys(map(_variable, same))))


def _notes(same: Mapping[str, Mapping[str, Any]]) -> list[str]:
    notes = []
    if nan := [entry for entry, fact in same.items() if fact.get("nan")]:
        notes.append(f"NaN on all ranks in {_names(nan)}")
    skipped: dict[str, list[str]] = {}
    for entry, fact in same.items():
        if "skipped" in fact:
            skipped.setdefault(fact["skipped"], []).append(entry)
    if skipped:
        texts = (f"{len(entries)} {why} ({_names(entries, 2)})" for why, entries in skipped.items())
        notes.append(f"not compared: {', '.join(texts)}")
    return notes


def _random_notes(differences: Sequence[Difference], same: Mapping[str, Mapping[str, Any]]) -> list[str]:
    if any(one.kind == "random" for one in differences):
        return ["random state differs (as it should where ranks draw their own)"]
    return ["random state is the same"] if any(fact["kind"] == "random" for fact in same.values()) else []


def _variable(entry: str) -> str:
    return re.split(r"[.\[]", entry, maxsplit=1)[0]


def _missing(ranks: Sequence[int]) -> str:
    return f"missing on {name_ranks(ranks)}"


def _and(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _names(names: Sequence[str], most: int = _MOST_NAMES) -> str:
    return ", ".join([*names[:most], *["..."] * (len(names) > most)])


def _count(n: int) -> str:
    return str(n) if n < 10_000 else next(f"{n / size:.1f} {unit}" for size, unit in _UNITS if n >= size)
