"""What a rank answers where its session gets more or fewer ranks: before, and once the group of all has formed."""

from __future__ import annotations

import hashlib
import random
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # exported at run time
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ddp_notebook.messages.ranks import Form
from ddp_notebook.messages.resize_messages import Inspect, Resized
from ddp_notebook.rank.group.stores import connect
from ddp_notebook.rank.resize.blockers import ResizeBlockers
from ddp_notebook.rank.variables import copying, samplers
from ddp_notebook.rank.variables.copying import names_of_user
from ddp_notebook.rank.variables.handover import Handover, dumps
from ddp_notebook.rank.variables.summary import fingerprints
from ddp_notebook.stdlib import json, re

_State = tuple[Callable[[], Any], Callable[[Any], object]]
RANDOM: Mapping[str, _State] = {  # by the names that `%ddp_check` has for them
    "random state of torch": (torch.get_rng_state, torch.set_rng_state),
    "random state of CUDA": (torch.cuda.get_rng_state, torch.cuda.set_rng_state),
    "random state of NumPy": (np.random.get_state, np.random.set_state),
    "random state of Python": (random.getstate, random.setstate),
}


class GivenVariables(NamedTuple):
    """What was handed over."""

    names: list[str]
    left: dict[str, str]  # by name: why it was not


def give_variables(
    handover: Handover, namespace: Mapping[str, Any], names: Sequence[str], states: Collection[str]
) -> GivenVariables:
    """Give variables and random states.

    Args:
        namespace: where the variables are.
        names: of those to be given; what cannot be pickled is left out.
        states: names of the random states.
    """
    chosen = {name: namespace[name] for name in names if name in namespace}
    known = {name: RANDOM[name][0]() for name in states if name in RANDOM}
    try:
        pickled, given, left = copying.read(chosen, (), dumps=lambda values: dumps((values, known)))
    except BaseException:
        handover.refuse()
        raise
    handover.give_pickled(*pickled)
    return GivenVariables(given, left)


def take_variables(handover: Handover, namespace: dict[str, Any]) -> None:
    """Take them."""
    values, states = handover.result()
    namespace.update(values)
    for name, state in states.items():
        RANDOM[name][1](state)


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


_MEET = timedelta(seconds=60)


def inspect(message: Inspect, namespace: dict[str, Any], hidden: Collection[str]) -> dict[str, Any]:
    """Answer `Inspect`.

    Args:
        namespace: the user's variables.
        hidden: names in it that are not the user's.
    """
    found = ResizeBlockers(namespace)
    names = [name for name in names_of_user(namespace, hidden) if name not in found.sharded]
    compared = digests(namespace, names) if message.compares else {}
    in_order = [name for name in names if name in compared]  # so that a model and what it wraps are told as elsewhere
    compared = {name: compared.pop(name) for name in in_order} | compared
    return {"sharded": found.sharded, "others": found.others, "digests": compared}


def settle(message: Resized, place: Form, namespace: dict[str, Any]) -> dict[str, Any]:
    """Do what `Resized` says.

    Args:
        place: of this rank now.
        namespace: the user's variables.

    Raises:
        RuntimeError: another rank that takes part is gone.
        whatever the pickling of a variable raises.
    """
    given = GivenVariables([], {})
    if message.number >= 0:
        at = PrefixStore(f"{place.store_prefix}/{place.epoch}", connect(place, _MEET))
        handover = Handover(at, message.meeting, number=message.number, size=message.size, timeout=_MEET)
        try:
            if message.number == 0:
                given = give_variables(handover, namespace, message.names, message.random)
            else:
                take_variables(handover, namespace)
        finally:
            handover.close()
    before, now = (message.was_rank, message.was_world_size), (place.rank, place.world_size)
    changes = [asdict(change) for change in samplers.resize(before, now, namespace)]
    return {"names": given.names, "left": given.left, "samplers": changes}
