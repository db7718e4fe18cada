"""What new ranks get from one that was there before: variables that are the same everywhere, and random states."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ddp_notebook.rank.variables import copying
from ddp_notebook.rank.variables.handover import Handover, dumps

_State = tuple[Callable[[], Any], Callable[[Any], object]]
RANDOM: Mapping[str, _State] = {  # by the names that `%ddp_check` has for them
    "random state of torch": (torch.get_rng_state, torch.set_rng_state),
    "random state of CUDA": (torch.cuda.get_rng_state, torch.cuda.set_rng_state),
    "random state of NumPy": (np.random.get_state, np.random.set_state),
    "random state of Python": (random.getstate, random.setstate),
}


class Given(NamedTuple):
    """What was handed over."""

    names: list[str]
    left: dict[str, str]  # by name: why it was not


def give(handover: Handover, namespace: Mapping[str, Any], names: Sequence[str], states: Collection[str]) -> Given:
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
    return Given(given, left)


def take(handover: Handover, namespace: dict[str, Any]) -> None:
    """Take them."""
    values, states = handover.take()
    namespace.update(values)
    for name, state in states.items():
        RANDOM[name][1](state)
