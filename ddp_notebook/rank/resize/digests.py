"""A few bytes for each variable, by which ranks find out which of them are the same everywhere."""

from __future__ import annotations

import hashlib
import types
from collections.abc import Collection, Mapping
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ddp_notebook.rank.variables.check import fingerprints
from ddp_notebook.stdlib import json, re


def digests(namespace: Mapping[str, Any], names: Collection[str]) -> dict[str, str]:
    """A digest of each variable: of what `%ddp_check` compares, of the data in datasets too. But of no buffers, which
    models in DDP get from rank 0 with each forward, and of no rank of a sampler's, which a new one has of its own. And
    one of each random state.

    Args:
        namespace: the variables.
        names: of those that are asked for.

    Example:
        >>> sorted(digests({"x": 1}, ["x"]))
        ['random state of NumPy', 'random state of Python', 'random state of torch', 'x']
    """
    modules = [name for name in names if issubclass(type(namespace[name]), types.ModuleType)]
    inside = {f"{name}.contents": of for name in names if (of := _contents(namespace[name]))}
    facts = fingerprints({}, ["random"])  # the random states: no variable has that name there
    for variables, asked in ((namespace, set(names) - set(modules)), (inside, set(inside))):
        if asked:  # else all that has to agree would be meant
            facts |= fingerprints(variables, sorted(asked))
    facts |= {name: {"kind": "variable", "value": namespace[name].__name__} for name in modules}
    there = {_variable(entry) for entry, fact in facts.items() if fact["kind"] != "within"}
    for name in set(names) - there:  # a loader's sampler: its entries are the loader's
        facts |= fingerprints(namespace, [name])
    by_variable: dict[str, list[Any]] = {}
    for entry, fact in facts.items():
        if fact["kind"] not in ("buffer", "share", "within"):
            by_variable.setdefault(_variable(entry), []).append([entry, fact])
    return {
        name: hashlib.blake2b(json.dumps(of, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()
        for name, of in by_variable.items()
    }


def _variable(entry: str) -> str:
    return re.split(r"[.\[]", entry, maxsplit=1)[0]


def _contents(value: Any) -> dict[str, Any]:
    """What a dataset holds, or that of a loader or sampler: of data `%ddp_check` compares the lengths alone."""
    if issubclass(type(value), DataLoader | DistributedSampler):
        value = value.dataset
    return dict(getattr(value, "__dict__", {})) if issubclass(type(value), Dataset) else {}
