"""A third of the part of the table that `test_table` plays, for ranks on two hosts, however these are reached."""

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
    """Give a test each entry of the third, and all of them three times in a row."""
    entries = pytest.mark.parametrize(
        ("world_size", "fault", "state", "victim"),
        [(n, FAULT[fault], STATE[state], at % n) for at, (n, fault, state) in THIRD],
        ids=[f"{fault}, {state}, {n} ranks" for _, (n, fault, state) in THIRD],
    )
    times = pytest.mark.parametrize("time", ["first", "second", "third"])
    return entries(times(test))  # pytest varies that of the outer decorator first


@contextmanager
def of_sizes(where: Mapping[int, str]) -> Iterator[Callable[[int], Ranks]]:
    """Yields what makes ranks of a number: one session for all entries, and another after one that fails.

    Args:
        where: by the number of ranks, the options of `%ddp_start` that say where they are to be.
    """
    with ExitStack() as stack:
        yield functools.cache(lambda n: stack.enter_context(closing(Ranks(n, where[n]))))
