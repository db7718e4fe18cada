"""A third of the entries of `test_table`, for ranks on two hosts with any transport."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager

import pytest

from tests.faults.harness import Ranks
from tests.faults.table import FAULT, STATE
from tests.faults.test_table import PART

THIRD = list(enumerate(PART))[::3]


def three_times(test: Callable[..., None]) -> Callable[..., None]:
    """Parametrize a test with each entry of the third, three times in a row."""
    entries = pytest.mark.parametrize(
        ("world_size", "fault", "state", "victim"),
        [(n, FAULT[fault], STATE[state], at % n) for at, (n, fault, state) in THIRD],
        ids=[f"{fault}, {state}, {n} ranks" for _, (n, fault, state) in THIRD],
    )
    times = pytest.mark.parametrize("time", ["first", "second", "third"])
    return entries(times(test))  # pytest varies the parameters of the outer decorator first


@contextmanager
def of_sizes(where: Mapping[int, str]) -> Iterator[Callable[[int], Ranks]]:
    """Yield a function that returns ranks by number: one session for all entries, and a new one after a failure.

    Args:
        where: Options of `%ddp_start` that select the hosts, by the number of ranks.
    """
    with ExitStack() as stack:
        yield functools.cache(lambda n: stack.enter_context(closing(Ranks(n, where[n]))))
