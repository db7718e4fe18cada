"""A part of the table of faults and states, which covers every fault and every state. `tests/long` runs all of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from tests import conftest
from tests.faults.entries import strike
from tests.faults.harness import Ranks
from tests.faults.table import FAULT, STATE

# (number of ranks, fault, state); the victim changes each time
PART = [
    (2, "sys.exit", "recv"),
    (2, "MemoryError", "sub-group"),
    (2, "os._exit", "idle"),
    (2, "os._exit", "FSDP forward"),
    (2, "SIGSEGV", "await"),
    (2, "SIGKILL", "DDP backward"),
    (2, "SIGSTOP", "send"),
    (2, "interrupt", "all_reduce"),
    (2, "raise", "TCPStore, nobody listens"),
    (2, "interrupt", "TCPStore, workers are missing"),
    (2, "interrupt", "FileStore.wait"),
    (2, "interrupt", "monitored_barrier"),
    (2, "interrupt", "torch future"),
    (2, "interrupt", "future in a pool"),
    (2, "interrupt", "thread join"),
    (2, "double interrupt", "Python loop"),
    (3, "raise", "Python loop"),
    (3, "sys.exit", "barrier"),
    (3, "MemoryError", "interpreter held"),
    (3, "os._exit", "all_reduce"),
    (3, "SIGSEGV", "init_process_group"),
]

pytestmark = pytest.mark.alone  # every cell has a time limit

# Checked after the module, not after each test: replacing ranks stay until it ends.
nothing_is_left = pytest.fixture(scope="module", autouse=True)(conftest.nothing_is_left.__wrapped__)  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def of_size() -> Iterator[Callable[[int], Ranks]]:
    """Return ranks by number: one session for all entries, and a new one after a failure."""
    with ExitStack() as stack:
        yield functools.cache(lambda world_size: stack.enter_context(closing(Ranks(world_size))))


@pytest.mark.parametrize(
    ("world_size", "fault", "state", "victim"),
    [(n, FAULT[fault], STATE[state], at % n) for at, (n, fault, state) in enumerate(PART)],
    ids=[f"{fault}, {state}, {n} ranks" for n, fault, state in PART],
)
def test_the_others_go_on(of_size, world_size, fault, state, victim):
    strike(of_size(world_size), state, fault, victim)


def test_every_fault_and_every_state_is_in_this_part():
    assert {fault for _, fault, _ in PART} == set(FAULT)
    assert {state for _, _, state in PART} == set(STATE)
