"""Unit tests start no process: `make test-unit` runs in seconds and needs no ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from tests.conftest import NoProcesses

FIXTURES_WITH_RANKS = {"session", "make_session", "make_session_alone", "kernel", "make_kernel", "ranks"}


def test_no_test_with_ranks_is_a_unit_test(request):
    items = request.session.items
    unit = [item for item in items if item.get_closest_marker("unit")]
    assert request.node in unit
    for item in unit:
        assert not FIXTURES_WITH_RANKS & set(item.fixturenames), item.nodeid
    for item in items:
        if FIXTURES_WITH_RANKS & set(getattr(item, "fixturenames", ())):
            assert item.get_closest_marker("ranks"), item.nodeid


@pytest.mark.parametrize(
    "start",
    [
        lambda: subprocess.run([sys.executable, "-c", ""], check=True),
        lambda: os.posix_spawn(sys.executable, [sys.executable, "-c", ""], os.environ),
        lambda: os.fork() or os._exit(0),
    ],
    ids=["subprocess", "posix_spawn", "fork"],
)
def test_a_unit_test_that_starts_a_process_is_refused(start, request):
    from tests import conftest

    guard: Any = conftest._no_processes
    assert isinstance(guard, NoProcesses) and guard.test == request.node.nodeid
    with pytest.raises(RuntimeError, match=r"test_a_unit_test_that_starts_a_process.*pytest\.mark\.processes"):
        start()
    assert len(guard.started) == 1, "the test would fail also if it had caught the error"
    guard.started.clear()
