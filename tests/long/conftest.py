"""Counters of repeated tests: attempts and successes, and a table of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from tests.benchmarks import results

# Limit for the repetitions while a test is being written. Such counts are not stored.
_AT_MOST = int(os.environ.get("DDP_NOTEBOOK_LONG_TIMES", "0"))
_counts = pytest.StashKey[list["Count"]]()
_moment = pytest.StashKey[str]()  # time of the first count
Tally = Callable[[int, str], Iterator[int]]


@dataclass(slots=True, kw_only=True)
class Count:
    """Count of successes."""

    what: str
    times: int
    right: int = 0

    def __repr__(self) -> str:
        return f"{self.right} of {self.times}"


@pytest.fixture
def tally(request) -> Tally:
    """Count the passes of a loop: `for n in tally(50, "description")`.

    A finished pass counts as a success. The first one that raises ends the test.
    """
    stash = request.config.stash
    stash.setdefault(_moment, results.moment())
    counts = stash.setdefault(_counts, [])

    def passes(times: int, what: str) -> Iterator[int]:
        count = Count(what=what, times=min(times, _AT_MOST or times))
        counts.append(count)
        for n in range(count.times):
            yield n
            count.right += 1

    return passes


def pytest_terminal_summary(terminalreporter, config) -> None:
    counts = config.stash.get(_counts, [])
    if not counts:
        return
    terminalreporter.section("counts")
    for count in counts:
        terminalreporter.line(f"{count!r}  {count.what}")
    if os.environ.get("DDP_NOTEBOOK_WRITE_RESULTS") == "1" and not _AT_MOST:
        rows = [f"| {count.what} | {count!r} |" for count in counts]
        results.replace_section("counts", [config.stash[_moment], "", "| repeated test | passed |", "|---|---|", *rows])
