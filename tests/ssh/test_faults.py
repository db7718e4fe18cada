"""A third of the faults of `tests/faults`, on ranks of two hosts with separate networks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.conftest import wait_until
from tests.faults.entries import strike
from tests.faults.harness import Ranks
from tests.faults.on_hosts import of_sizes, three_times
from tests.faults.test_table import nothing_is_left  # noqa: F401  # of the module, as there
from tests.ssh import namespaces, sshd

pytestmark = [pytest.mark.alone, pytest.mark.long]


@pytest.fixture(scope="module")
def of_size(tmp_path_factory) -> Iterator[Callable[[int], Ranks]]:
    """Return ranks by number. The last rank is on a separate host."""
    directory = tmp_path_factory.mktemp("network")
    with namespaces.hosts(directory, "a", "b") as made, pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDP_NOTEBOOK_SSH", made.command)
        python = f"--python {sshd.python(directory)}"
        with of_sizes({2: f"--hosts a:1,b:1 {python}", 3: f"--hosts a:2,b:1 {python}"}) as make:
            yield make
        wait_until(made.are_idle, what="nothing is left on the hosts")


@three_times
def test_the_others_go_on(of_size, world_size, fault, state, victim, time):
    strike(of_size(world_size), state, fault, victim)
