"""A third of the faults of `tests/faults`, on ranks of two nodes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from tests.faults.entries import strike
from tests.faults.harness import Ranks
from tests.faults.table import FAULT, STATE
from tests.faults.test_table import PART, nothing_is_left  # noqa: F401  # of the module, as there
from tests.slurm import conftest

pytestmark = [pytest.mark.alone, pytest.mark.long]
_TASKS = {2: "-N2", 3: "-N2 -n3"}

# Of the module, not of each test: the jobs stay until it ends.
queue_is_empty = pytest.fixture(scope="module", autouse=True)(conftest.queue_is_empty.__wrapped__)  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def of_size(slurm) -> Iterator[Callable[[int], Ranks]]:
    """Ranks of this number: one job for all entries, and another after one that fails."""
    with ExitStack() as stack:
        make = functools.cache(lambda n: stack.enter_context(closing(Ranks(n, f'--slurm "{_TASKS[n]}"'))))
        yield make


@pytest.mark.parametrize(
    ("world_size", "fault", "state", "victim"),
    [(n, FAULT[fault], STATE[state], at % n) for at, (n, fault, state) in list(enumerate(PART))[::3]],
    ids=[f"{fault}, {state}, {n} ranks" for n, fault, state in PART[::3]],
)
def test_the_others_go_on(of_size, world_size, fault, state, victim):
    strike(of_size(world_size), state, fault, victim)
