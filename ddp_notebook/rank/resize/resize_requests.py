"""Replies of a rank to requests of a resize: before it, and after the new group has formed."""

from __future__ import annotations

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
from ddp_notebook.stdlib import hashlib, json, re

_State = tuple[Callable[[], Any], Callable[[Any], object]]
RANDOM: Mapping[str, _State] = {  # the names are those of `%ddp_check`
    "random state of torch": (torch.get_rng_state, torch.set_rng_state),
    "random state of CUDA": (torch.cuda.get_rng_state, torch.cuda.set_rng_state),
    "random state of NumPy": (np.random.get_state, np.random.set_state),
    "random state of Python": (random.getstate, random.setstate),
}


class GivenVariables(NamedTuple):
    """Result of `give_variables`."""

    names: list[str]
    left: dict[str, str]  # name -> reason why it was not sent


def give_variables(
    handover: Handover, namespace: Mapping[str, Any], names: Sequence[str], states: Collection[str]
) -> GivenVariables:
    """Send variables and random states.

    Args:
        handover: connection to the receiving ranks.
        namespace: the variables.
        names: variables to send. Those that cannot be pickled are left out.
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
    """Receive variables and random states."""
    values, states = handover.result()
    namespace.update(values)
    for name, state in states.items():
        RANDOM[name][1](state)


def digests(namespace: Mapping[str, Any], names: Collection[str]) -> dict[str, str]:
    """Return a digest of each variable and of each random state.

    It covers the same contents as `%ddp_check`, plus the data in datasets. It excludes buffers, which DDP models get
    from rank 0 at each forward pass, and the rank of a sampler, which differs between ranks.

    Args:
        namespace: variables.
        names: names of the variables to cover.

    Example:
        >>> sorted(digests({"x": 1}, ["x"]))
        ['random state of NumPy', 'random state of Python', 'random state of torch', 'x']
    """
    modules = [name for name in names if issubclass(type(namespace[name]), types.ModuleType)]
    inside = {f"{name}.contents": of for name in names if (of := _contents(namespace[name]))}
    facts = fingerprints({}, ["random"])  # only the random states: the empty namespace has no variable `random`
    for variables, asked in ((namespace, set(names) - set(modules)), (inside, set(inside))):
        if asked:  # an empty list would select everything that has to be equal
            facts |= fingerprints(variables, sorted(asked))
    facts |= {name: {"kind": "variable", "value": namespace[name].__name__} for name in modules}
    there = {_variable(entry) for entry, fact in facts.items() if fact["kind"] != "within"}
    for name in set(names) - there:  # samplers of loaders: their entries belong to the loader
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
    """Return the contents of a dataset, also that of a loader or sampler.

    `%ddp_check` only compares the length of data.
    """
    if issubclass(type(value), DataLoader | DistributedSampler):
        value = value.dataset
    return dict(getattr(value, "__dict__", {})) if issubclass(type(value), Dataset) else {}


_MEET = timedelta(seconds=60)


def inspect(message: Inspect, namespace: dict[str, Any], hidden: Collection[str]) -> dict[str, Any]:
    """Return the reply to `Inspect`.

    Args:
        message: the request.
        namespace: variables of the user.
        hidden: names in it that do not belong to the user.
    """
    found = ResizeBlockers(namespace)
    names = [name for name in names_of_user(namespace, hidden) if name not in found.sharded]
    compared = digests(namespace, names) if message.compares else {}
    in_order = [name for name in names if name in compared]  # usual order, for a model and its wrapper
    compared = {name: compared.pop(name) for name in in_order} | compared
    return {"sharded": found.sharded, "others": found.others, "digests": compared}


def settle(message: Resized, place: Form, namespace: dict[str, Any]) -> dict[str, Any]:
    """Handle `Resized` and return the reply.

    Args:
        message: the request.
        place: new place of this rank.
        namespace: variables of the user.

    Raises:
        RuntimeError: another participating rank has died.
        Exception: any error when a variable is pickled.
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
