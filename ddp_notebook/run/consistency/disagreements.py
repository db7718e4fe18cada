"""Find mistakes between ranks that no single rank can notice.

Examples are different inputs of tensor parallel modules, and checkpoints that ranks save to different places or only in
part.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ddp_notebook.records.words import list_ranks, name_ranks

# Largest relative distance of tensors that each rank has computed by itself. Integers are exact.
_APART = {"float16": 3e-2, "bfloat16": 3e-2, "float32": 1e-3, "float64": 1e-3}

Facts = Mapping[int, Mapping[str, Any]]  # results of `rank.sharding.mistakes.Mistakes.facts`, by rank


def between(by_rank: Facts, names: Collection[str] = ()) -> list[str]:
    """Return a sentence for each mistake, with its ranks.

    Args:
        by_rank: facts of the ranks.
        names: only mistakes with these variables; empty: all mistakes.

    Example:
        >>> a, b = ({"cell": 1, "how": "distributed", "path": path, "ranks": [0, 1]} for path in ("/a", "/b"))
        >>> between({0: {"saves": [a]}, 1: {"saves": [b]}})[0][:60]
        'ranks 0,1 saved one checkpoint to different paths: /a on ran'
    """
    found = [*_said_by_each(by_rank, names), *_unequal(by_rank, names)]
    if not names:  # a save has a path, and no variable
        found += [*_apart(by_rank), *_in_part(by_rank), *_over_each_other(by_rank)]
    return found


def variables_of(mistake: str, by_rank: Facts) -> set[str]:
    """Return the variables of a mistake that a rank has found by itself; empty for other mistakes."""
    about = (facts.get("about", {}).items() for facts in by_rank.values())
    return {name for of_rank in about for text, names in of_rank if mistake.endswith(text) for name in names}


def unread(shares: Mapping[int, Mapping[str, str]]) -> list[str]:
    """Return sentences about samplers for which no rank reads some part of the data.

    If a model is sharded over ranks, several ranks may read one part, but every part needs a reader.

    Args:
        shares: "0 of 2" or "all" by entry, for each rank of the session.

    Example:
        >>> unread({0: {"loader.sampler.rank": "0 of 2"}, 1: {"loader.sampler.rank": "0 of 2"}})[0][:79]
        'ranks 0,1: loader.sampler.rank is 0 on ranks 0-1, so of 2 parts of the data 1 i'
    """
    found = []
    for entry in dict.fromkeys(entry for of_rank in shares.values() for entry in of_rank):
        holders: dict[int, list[int]] = {}
        counts = set()
        for rank, of_rank in shares.items():
            if of_rank.get(entry, "all") != "all":
                part, count = map(int, of_rank[entry].split(" of "))
                holders.setdefault(part, []).append(rank)
                counts.add(count)
        left = max(counts, default=0) - len(holders)
        if len(counts) > 1 or left <= 0:  # otherwise `num_replicas` differs, which is reported separately
            continue
        held = ", ".join(f"{part} on {name_ranks(ranks)}" for part, ranks in holders.items())
        there = sorted(rank for ranks in holders.values() for rank in ranks)
        found.append(
            f"{list_ranks(there)}: {entry} is {held}, so of {max(counts)} parts of the data "
            f"{left} {'is' if left == 1 else 'are'} read by no rank: make it on each rank with DistributedSampler(..., "
            "rank=rank), or without num_replicas and rank"
        )
    return found


def read_by_all(shares: Mapping[int, Mapping[str, str]]) -> list[str]:
    """Return the loaders that each rank reads completely.

    Args:
        shares: as for `unread`.

    Example:
        >>> read_by_all({0: {"loader.sampler.rank": "all"}, 1: {"loader.sampler.rank": "all"}})
        ['loader']
    """
    first, *others = shares.values()
    entries = [one for one, share in first.items() if share == "all" and all(of.get(one) == share for of in others)]
    return [entry.removesuffix(".sampler.rank") for entry in entries]


def _said_by_each(by_rank: Facts, names: Collection[str]) -> Iterator[str]:
    """Yield the mistakes that a rank notices by itself."""
    ranks_of: dict[str, list[int]] = {}
    for rank, facts in by_rank.items():
        about = facts.get("about", {})
        for text in facts.get("told", ()):
            if names and set(names).isdisjoint(about.get(text, ())):
                continue
            ranks_of.setdefault(text, []).append(rank)
    yield from (f"{list_ranks(ranks)}: {text}" for text, ranks in ranks_of.items())


def _of_last_cell(by_rank: Facts, kind: str) -> dict[int, list[Mapping[str, Any]]]:
    """Return the facts of the last cell that any rank reports, by rank. It may have run on some ranks only."""
    last = max((one["cell"] for facts in by_rank.values() for one in facts.get(kind, ())), default=0)
    return {rank: [one for one in facts.get(kind, ()) if one["cell"] == last] for rank, facts in by_rank.items()}


# ---- inputs of tensor parallel


_TAKES = {  # kind of the unequal tensor -> event, code that requires equal tensors, remedy
    "input": (
        "module {} got different inputs",
        "tensor parallel",
        "give all ranks of a group the same batch and seed, and no part of a sharded output",
    ),
    "gradient": (
        "gradients of what to_local gave differ",
        "DTensor",
        "after a tensor-parallel module all ranks of a group need the same layers, batch and targets",
    ),
    "partial": (
        "gradients of what to_local gave differ",
        "DTensor",
        "it was a partial sum, and each rank has used its own summand; call full_tensor(), or "
        "redistribute(placements=[Replicate()]) before to_local()",
    ),
    "tensor": ("DTensor.from_local got different tensors as Replicate()", "it", "make them the same on all ranks"),
}


def _unequal(by_rank: Facts, names: Collection[str]) -> Iterator[str]:
    """Yield mistakes about tensors that must be equal. Only the first one of a group is reported, because it causes the
    others.
    """
    tensors: dict[tuple[int, ...], dict[tuple[str, str, int], dict[int, Mapping[str, Any]]]] = {}
    for rank, replicas in _of_last_cell(by_rank, "replicas").items():
        for one in replicas:
            if names and set(names).isdisjoint(one.get("about", ())):
                continue
            of_group = tensors.setdefault(tuple(one["ranks"]), {})
            of_group.setdefault((one["what"], one["module"], one["at"]), {})[rank] = one
    for ranks, of_group in tensors.items():
        found: dict[tuple[str, str], tuple[Mapping[str, Any], float]] = {}
        for (what, module, _), of_rank in of_group.items():
            if set(of_rank) == set(ranks) and (what, module) not in found:
                far = max(_distance(of_rank[ranks[0]], of_rank[rank]) for rank in ranks[1:])
                if far:
                    found[what, module] = of_rank[ranks[0]], far
        if not found:
            continue
        (what, module), (one, far) = next(iter(found.items()))
        modules = sum(key == "input" for key, _ in found)
        got, who, fix = _TAKES[what]
        got = got.format(f"{module} and {modules - 1} more" if modules > 1 else module)
        how = "other shapes or types" if math.isinf(far) else f"relative difference {far:.1g}"
        facts = f"{one['dtype']} {tuple(one['shape'])}, {how}"
        yield f"{list_ranks(ranks)}: {got} ({facts}), and {who} takes them for the same: {fix}"


def _distance(a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
    """Return the distance of two tensors, relative to the larger norm; 0 if it is within the tolerance."""
    if a["dtype"] != b["dtype"] or a["shape"] != b["shape"]:
        return math.inf
    (length, *sums), (other, *others) = a["sketch"], b["sketch"]
    if any(map(math.isnan, (length, other))):
        return 0.0  # NaN cannot be compared
    longest = max(length, other)
    if math.isinf(longest) or not longest:
        return 0.0
    apart = math.sqrt(sum((x - y) ** 2 for x, y in zip(sums, others, strict=True)) / len(sums)) / longest
    return apart if apart > _APART.get(a["dtype"], 0.0) else 0.0


# ---- checkpoints


def _saves(by_rank: Facts, how: str) -> dict[int, list[Mapping[str, Any]]]:
    saves = _of_last_cell(by_rank, "saves")
    return {rank: [one for one in ones if one["how"] == how] for rank, ones in saves.items()}


def _apart(by_rank: Facts) -> Iterator[str]:
    """Yield mistakes about a distributed checkpoint that ranks save to different places."""
    of_group: dict[tuple[int, ...], dict[int, list[str]]] = {}
    for rank, saves in _saves(by_rank, "distributed").items():
        for one in saves:
            of_group.setdefault(tuple(one["ranks"]), {}).setdefault(rank, []).append(one["path"])
    for paths in of_group.values():
        for at_once in zip(*paths.values(), strict=False):
            if len(set(at_once)) > 1:
                where = ", ".join(f"{path} on rank {rank}" for rank, path in zip(paths, at_once, strict=True))
                yield (
                    f"{list_ranks(list(paths))} saved one checkpoint to different paths: {where}. None of these can be "
                    "loaded, because each has only some of its parts; pass the same path on all ranks"
                )
                break


def _in_part(by_rank: Facts) -> Iterator[str]:
    """Yield mistakes about `torch.save` of a sharded model on some ranks, which writes only their shards."""
    saves = {rank: [one for one in ones if one["sharded"]] for rank, ones in _saves(by_rank, "alone").items()}
    for rank, ones in saves.items():
        for one in ones:
            if lacking := [other for other in one["ranks"] if other in saves and not saves[other]]:
                count = f"{one['sharded']} tensor{'s' * (one['sharded'] > 1)}"
                yield (
                    f"rank {rank}: torch.save wrote this rank's part of {count} to {one['path']}, and "
                    f"{name_ranks(lacking)} saved none. Save with torch.distributed.checkpoint on all ranks, or save "
                    "the result of get_model_state_dict with StateDictOptions(full_state_dict=True)"
                )
                break


def _over_each_other(by_rank: Facts) -> Iterator[str]:
    """Yield mistakes about `torch.save` of several ranks to one file."""
    ranks_of: dict[tuple[Any, ...], list[int]] = {}
    for rank, saves in _saves(by_rank, "alone").items():
        for key in {(one["path"], *one["file"]) for one in saves if one["file"]}:
            ranks_of.setdefault(key, []).append(rank)
    for (path, *_), ranks in ranks_of.items():
        if len(ranks) > 1:
            yield (
                f"{list_ranks(ranks)}: all of them saved to {path}, one over the other: let one rank save, or put the "
                "rank into the name"
            )
