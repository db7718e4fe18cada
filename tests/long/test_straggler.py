"""A slow rank is always detected, and no rank is reported if all are equally fast."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ddp_notebook import api
from tests.recording.slow import PHASES

pytestmark = pytest.mark.long
TIMES = 20


@pytest.fixture(scope="module")
def session() -> Iterator[Any]:
    """Four ranks."""
    with api.start(4) as running:
        running.run("from tests.recording.slow import train", quiet=True)
        yield running


@pytest.mark.parametrize("phase", PHASES)
def test_a_slow_rank_is_named(session, tally, phase):
    for n in tally(TIMES, f"a rank that is 50 ms slower in {phase} is reported, with this phase"):
        session.run(f"train({phase!r} if rank == {n % 4} else '')", quiet=True)
        found = session.recording.straggler()
        assert found is not None and (found.rank, found.phase) == (n % 4, phase), found


def test_nobody_is_named(session, tally):
    for _ in tally(TIMES, "no straggler is reported if all ranks are equally fast"):
        session.run("train('', steps=40)", quiet=True)
        assert (found := session.recording.straggler()) is None, found
