"""Findings that hold only for several ranks together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations, pairwise
from typing import Any, NamedTuple

from ddp_notebook.run.findings.random_numbers import mixed_samplers

Fact = tuple[int, dict[str, Any]]  # step and details
OfRanks = dict[int, Fact]

_CONSECUTIVE = 3


def compared(facts: Mapping[str, OfRanks]) -> dict[str, OfRanks]:
    """Return the findings that follow from a comparison of ranks.

    Args:
        facts: facts by name and rank.
    """
    found = {}
    if same := same_batches(facts.get("batches", {})):
        found["same-batches"] = same
    if skipped := skipped_batch(facts.get("draws", {})):
        found["skipped-batch"] = skipped
    if mixed := mixed_values(facts.get("values", {})):
        found["mixed-values"] = mixed
    if outside := not_averaged(facts.get("outside", {})):
        found["not-averaged"] = outside
    if weights := mixed_weights(facts.get("weights", {})):
        found["mixed-weights"] = weights
    if norms := norms_of_shards(facts.get("norms", {})):
        found["clipped-shards"] = norms
    if samplers := mixed_samplers(facts.get("random", {})):
        found["mixed-samplers"] = samplers
    return found


def not_averaged(facts: OfRanks) -> OfRanks:
    """Return the parameters that an optimizer has trained, that DDP does not average, and whose values differ now.

    Parameters outside of the DDP model count only if they had the same values before.

    Example:
        >>> def own(first, last): return {"model": "m", "ranks": [0, 1], "values": [["scale", False, first, last]]}
        >>> not_averaged({0: (1, own(5, 6)), 1: (1, own(5, 7))})[0]
        (1, {'model': 'm', 'names': ['scale'], 'is_inside': False})
        >>> not_averaged({0: (1, own(5, 6)), 1: (1, own(5, 6))}), not_averaged({0: (1, own(4, 6)), 1: (1, own(5, 7))})
        ({}, {})
    """
    own = {rank: one["values"] for rank, (_, one) in facts.items() if rank in one["ranks"]}
    steps = {(step, one["model"], tuple(one["ranks"])) for step, one in facts.values()}
    if len(steps) != 1 or len({str([name for name, *_ in values]) for values in own.values()}) != 1:
        return {}
    ((step, model, ranks),) = steps
    if set(own) != set(ranks):
        return {}
    found: dict[bool, list[str]] = {True: [], False: []}  # names inside and outside of the model
    for same in zip(*own.values(), strict=True):
        name, is_inside, *_ = same[0]
        if (is_inside or len({first for *_, first, _ in same}) == 1) and len({last for *_, last in same}) > 1:
            found[is_inside].append(name)
    is_inside = bool(found[True])
    names = found[is_inside]
    return {rank: (step, {"model": model, "names": names, "is_inside": is_inside}) for rank in own if names}


def mixed_weights(facts: OfRanks) -> OfRanks:
    """Return the weights that differed between ranks when FSDP sharded them, and that have not changed since then.

    Example:
        >>> def of(first, second): return {"model": "m", "groups": [[[0, 1], [["w", first], ["b", second]]]]}
        >>> mixed_weights({0: (1, of(5, 6)), 1: (1, of(5, 7))})[0]
        (1, {'model': 'm', 'names': ['b']})
        >>> mixed_weights({0: (1, of(5, 6)), 1: (1, of(5, None))}), mixed_weights({0: (1, of(5, 6))})
        ({}, {})
    """
    names: dict[int, list[str]] = {rank: [] for rank in facts}
    for at, (ranks, values) in enumerate(next(iter(facts.values()))[1]["groups"] if facts else []):
        own = [one["groups"][at] for rank in ranks if (one := facts.get(rank, (0, {}))[1]) and len(one["groups"]) > at]
        if len(own) < len(ranks) or any(one[0] != ranks or len(one[1]) != len(values) for one in own):
            continue
        for same in zip(*(one[1] for one in own), strict=True):
            sums = {checksum for _, checksum in same}
            if len({name for name, _ in same}) == 1 and None not in sums and len(sums) > 1:
                for rank in ranks:
                    names[rank].append(same[0][0])
    return {
        rank: (facts[rank][0], {"model": facts[rank][1]["model"], "names": own}) for rank, own in names.items() if own
    }


_SAME_NORM = 1e-3  # relative difference


def norms_of_shards(facts: OfRanks) -> OfRanks:
    """Return the first norms that differ between ranks, with which a rank has clipped its shards.

    Norms below the limit change no gradient.

    Example:
        >>> def of(*all_of): return {"model": "m", "ranks": [0, 1], "norms": [[1, norm, 2.5] for norm in all_of]}
        >>> norms_of_shards({0: (1, of(2.0, 3.0)), 1: (1, of(2.0, 4.0))})[1]
        (1, {'model': 'm', 'value': 4.0})
        >>> norms_of_shards({0: (1, of(3.0)), 1: (1, of(3.0))}), norms_of_shards({0: (1, of(1.0)), 1: (1, of(2.0))})
        ({}, {})
    """
    for _, own in facts.values():
        some = {rank: facts[rank][1] for rank in own["ranks"] if rank in facts}
        if len(some) < len(own["ranks"]) or any(one["ranks"] != own["ranks"] for one in some.values()):
            continue
        for of_ranks in zip(*(one["norms"] for one in some.values()), strict=False):
            norms = [norm for _, norm, _ in of_ranks]
            is_clipped = any(norm > limit for _, norm, limit in of_ranks)
            if is_clipped and max(norms) - min(norms) > _SAME_NORM * max(norms):
                found = zip(some, norms, strict=True)
                return {rank: (of_ranks[0][0], {"model": own["model"], "value": norm}) for rank, norm in found}
    return {}


def same_batches(facts: OfRanks) -> OfRanks:
    """Return the ranks with the same inputs and losses in three consecutive steps, which differ from step to step.

    Ranks with other losses may each take another part of the inputs inside of the model.

    Example:
        >>> own = {"model": "model", "ranks": [0, 1], "steps": [[1, 7, "0.5 "], [2, 8, "0.6 "], [3, 9, "0.4 "]]}
        >>> same_batches({0: (0, own), 1: (0, own)})[1]
        (1, {'model': 'model', 'last': 3, 'same': 3, 'compared': 3})
        >>> same_batches({0: (0, own), 1: (0, {**own, "steps": [[1, 7, "0.5 "], [2, 8, "0.6 "], [3, 9, "0.2 "]]})})
        {}
    """
    by_run: dict[tuple[Any, ...], list[int]] = {}
    for rank, (_, own) in sorted(facts.items()):
        for first, values in _runs(own["steps"]):
            by_run.setdefault((first, values, own["model"], tuple(own["ranks"])), []).append(rank)
    for (first, _, model, group), ranks in sorted(by_run.items()):
        inside = [rank for rank in ranks if rank in group]
        if len(inside) > 1:
            same, compared = _same_steps([facts[rank][1]["steps"] for rank in inside], first)
            own = {"model": model, "last": first + _CONSECUTIVE - 1, "same": same, "compared": compared}
            return {rank: (first, own) for rank in inside}
    return {}


def shared_inputs(facts: OfRanks) -> list[list[int]] | None:
    """Return the groups of ranks with the same inputs and losses in all compared steps.

    Returns None if the distinct inputs cannot be counted: ranks share the inputs of some steps, or only the inputs.

    Args:
        facts: the fact "batches" of each rank.

    Example:
        >>> def of(*steps): return 0, {"model": "model", "ranks": [0, 1], "steps": [list(one) for one in steps]}
        >>> shared_inputs({0: of((1, 7, "0.5 "), (2, 8, "0.6 ")), 1: of((1, 7, "0.5 "), (2, 8, "0.6 "))})
        [[0, 1]]
        >>> shared_inputs({0: of((1, 7, "0.5 ")), 1: of((1, 9, "0.5 "))})
        []
        >>> shared_inputs({0: of((1, 7, "0.5 ")), 1: of((1, 7, "0.4 "))}) is None
        True
    """
    steps = {rank: {step: tuple(rest) for step, *rest in own["steps"]} for rank, (_, own) in sorted(facts.items())}
    groups: list[list[int]] = []
    for rank, own in steps.items():
        known = None
        for group in groups:
            other = steps[group[0]]
            common = own.keys() & other.keys()
            if common and all(own[step] == other[step] for step in common):
                known = group
            elif any(own[step][0] == other[step][0] for step in common):
                return None
        if known is None:
            groups.append([rank])
        else:
            known.append(rank)
    return [group for group in groups if len(group) > 1]


def _same_steps(of_ranks: list[list[list[Any]]], first: int) -> tuple[int, int]:
    """Return in how many compared steps from `first` on the inputs of all ranks are the same, and how many there are.

    Args:
        of_ranks: compared steps of each rank: step, checksum of the inputs, and losses.
        first: number of a step.
    """
    inputs = [{step: checksum for step, checksum, _ in steps if step >= first} for steps in of_ranks]
    common = set.intersection(*(set(one) for one in inputs))
    return sum(len({one[step] for one in inputs}) == 1 for step in common), len(common)


def _runs(steps: list[list[Any]]) -> Iterator[tuple[int, tuple[tuple[int, str], ...]]]:
    """Yield the first step and the checksums and losses of three consecutive steps with different inputs."""
    for at in range(len(steps) - _CONSECUTIVE + 1):
        some = steps[at : at + _CONSECUTIVE]
        values = tuple((inputs, losses) for _, inputs, losses in some)
        if some[-1][0] - some[0][0] == _CONSECUTIVE - 1 and len({one for one, _ in values}) == _CONSECUTIVE:
            yield some[0][0], values


_FEWEST = 2  # consecutive steps with the same distance


def skipped_batch(facts: OfRanks) -> OfRanks:
    """Return the ranks that average gradients of different batches of their loaders, from some step on.

    All ranks must have drawn equally many batches until then, and one batch for each step afterwards. A loop that
    draws as many batches as it needs for a step is left out.

    Example:
        >>> regular = {"ranks": [0, 1], "draws": [[1, 0, 1]], "last": 9}
        >>> skipping = {"ranks": [0, 1], "draws": [[1, 0, 1], [4, 0, 5]], "last": 9}
        >>> skipped_batch({0: (0, regular), 1: (0, skipping)})
        {0: (4, {'batch': 4}), 1: (4, {'batch': 5})}
        >>> skipped_batch({0: (0, regular), 1: (0, regular)})
        {}
    """
    if len(facts) < 2 or len({tuple(own["ranks"]) for _, own in facts.values()}) > 1:
        return {}
    own = {rank: one for rank, (_, one) in facts.items() if rank in one["ranks"]}
    last = min(one["last"] for one in own.values())
    for step in sorted({draw[0] for one in own.values() for draw in one["draws"]}):
        here = _positions(own, step)
        if step + _FEWEST - 1 > last or len({passes for passes, _ in here.values()}) > 1:
            return {}
        if len({count for _, count in here.values()}) > 1:
            is_steady = all(
                _positions(own, step + n) == {rank: (passes, count + n) for rank, (passes, count) in here.items()}
                for n in range(_FEWEST)
            )
            return {rank: (step, {"batch": here[rank][1]}) for rank in sorted(own)} if is_steady else {}
    return {}


def _positions(own: Mapping[int, dict[str, Any]], step: int) -> dict[int, tuple[int, int]]:
    """Return the pass and the number of drawn batches of each rank at a step."""
    return {rank: _position(one["draws"], step) for rank, one in own.items()}


def _position(draws: list[list[int]], step: int) -> tuple[int, int]:
    """Return the pass and the number of drawn batches of a step. Between entries, each step draws one batch."""
    first, passes, count = draws[0]
    for one in draws:
        if one[0] <= step:
            first, passes, count = one
    return passes, count + step - first


_GRADIENT = "gradient"  # kind of a value


class _Value(NamedTuple):
    """The value that a collective got on one rank, see `rank/findings/values`."""

    operation: str
    line: str
    kind: str
    name: str
    passes: list[list[Any]]

    @property
    def identity(self) -> tuple[str, ...]:
        """Return the data by which ranks recognize the value. A gradient may be passed in several lines."""
        return (self.kind, self.name) if self.kind == _GRADIENT else (self.kind, self.name, self.line)


def mixed_values(facts: OfRanks) -> OfRanks:
    """Return two ranks that have passed different values to one collective, if that is certainly wrong.

    A program may use another variable on one rank, for example as the source of a broadcast. So it is wrong only if
    both ranks pass the same values in another order, or if one rank skips a pass of a loop.

    Example:
        >>> def calls(*names): return [["", n, "all_reduce", "line 2", "loop", x, []] for n, x in enumerate(names)]
        >>> def of(first, second): return mixed_values({0: (0, {"calls": first}), 1: (0, {"calls": second})})
        >>> of(calls("a", "b"), calls("b", "a"))[0]
        (0, {'number': 0, 'call': 'all_reduce', 'line': 'line 2', 'value': 'a'})
        >>> of(calls("a", "b"), calls("a", "c"))
        {}
    """
    by_group: dict[str, dict[int, dict[int, _Value]]] = {}
    for rank, (_, own) in sorted(facts.items()):
        for group, number, *value in own["calls"]:
            by_group.setdefault(group, {}).setdefault(rank, {})[number] = _Value(*value)
    for ranks in by_group.values():
        for some in combinations(ranks, 2):
            first, second = (ranks[one] for one in some)
            for find in (_in_another_order, _in_another_pass):
                if (found := find(first, second)) is not None:
                    number, texts = found
                    of = zip(some, (first[number], second[number]), texts, strict=True)
                    return {
                        rank: (0, {"number": number, "call": one.operation, "line": one.line, "value": text})
                        for rank, one, text in of
                    }
    return {}


def _in_another_order(first: dict[int, _Value], second: dict[int, _Value]) -> tuple[int, tuple[str, str]] | None:
    """Return the first call in which two ranks have passed different values, although both pass both of them."""
    others = {
        number: (first[number], second[number])
        for number in sorted(first.keys() & second.keys())
        if first[number].kind == second[number].kind and first[number].name != second[number].name
    }
    of_first, of_second = ({one[at].identity for one in others.values()} for at in (0, 1))
    for number, (mine, theirs) in others.items():
        is_in_both = theirs.identity in of_first, mine.identity in of_second
        # A rank that skips a gradient passes all later ones in another call.
        if mine.name and theirs.name and (any(is_in_both) if mine.kind == _GRADIENT else all(is_in_both)):
            return number, (mine.name, theirs.name)
    return None


def _in_another_pass(first: dict[int, _Value], second: dict[int, _Value]) -> tuple[int, tuple[str, str]] | None:
    """Return the first call in which two ranks are in different passes of a loop, after calls in equal passes.

    The numbers of passes must grow on both ranks. A later pass of one rank must be in the other rank's calls too.
    """
    common = sorted(first.keys() & second.keys())
    for line in dict.fromkeys(first[number].line for number in common):
        pairs = [
            (number, first[number].passes, second[number].passes)
            for number in common
            if first[number].line == second[number].line == line and first[number].name == second[number].name
        ]
        sides = [mine for _, mine, _ in pairs], [theirs for _, _, theirs in pairs]
        if not all(sides[0]) or not all(a < b for side in sides for a, b in pairwise(side)):
            continue
        for number, mine, theirs in pairs:
            if mine != theirs:
                is_known = mine in sides[1] or theirs in sides[0]
                if number != pairs[0][0] and is_known:
                    return number, (_passes(mine), _passes(theirs))
                break
    return None


def _passes(passes: list[list[Any]]) -> str:
    return " and ".join(f"{name}={value}" for name, value in passes)
