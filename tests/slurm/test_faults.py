"""A third of the faults of `tests/faults`, on ranks of two nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.faults.entries import strike
from tests.faults.harness import Ranks
from tests.faults.on_hosts import of_sizes, three_times
from tests.faults.test_table import nothing_is_left  # noqa: F401  # of the module, as there
from tests.slurm import conftest

pytestmark = [pytest.mark.alone, pytest.mark.long]

# Checked after the module, not after each test: the jobs stay until it ends.
queue_is_empty = pytest.fixture(scope="module", autouse=True)(conftest.queue_is_empty.__wrapped__)  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def of_size(slurm) -> Iterator[Callable[[int], Ranks]]:
    """Return ranks by number, in a separate job."""
    with of_sizes({2: '--slurm "-N2"', 3: '--slurm "-N2 -n3"'}) as make:
        yield make


@three_times
def test_the_others_go_on(of_size, world_size, fault, state, victim, time):
    strike(of_size(world_size), state, fault, victim)
