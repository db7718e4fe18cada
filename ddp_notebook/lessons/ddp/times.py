"""When each rank did what in the steps of a run: pieces of time that pictures draw and tables sum.

    work       |forward |backward        |waiting|exposed   |optimizer|
    bucket 0            |waiting|hidden  |exposed|
    bucket 1                    |waiting         |exposed   |
                              all of them have it ^

In its backward a rank has nothing left to compute from the time at which its last bucket was issued. Until the last
rank has issued that bucket too it waits, and from then on communication is exposed.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ddp_notebook.observe.views import Step

PARTS = ("compute", "waiting", "exposed", "optimizer")


class StepSpan(NamedTuple):
    """A forward, backward or optimizer step of a rank."""

    rank: int
    start_ns: int
    end_ns: int
    kind: str


class Piece(NamedTuple):
    """What a rank, or one bucket of it, did for a while."""

    bucket: int | None  # None: the rank's own work
    start_ns: int
    end_ns: int
    meaning: str  # of `ddp_notebook.display.FILLS`
    words: str = ""


def pieces(spans: Iterable[StepSpan], steps: Sequence[Step], step: Step) -> list[Piece]:
    """The pieces of one step of one rank.

    Args:
        spans: of all ranks.
        steps: of all ranks.
        step: the one that is asked for.
    """
    arrived = _arrivals(steps, step.step)
    found: list[Piece] = []
    ready = max((one.issue_ns for one in step.buckets), default=step.start_ns)
    for span in spans:
        if span.rank != step.rank or not step.start_ns <= span.start_ns < step.end_ns:
            continue
        if span.kind != "backward":
            meaning = "compute" if span.kind == "forward" else "optimizer"
            found.append(Piece(None, span.start_ns, span.end_ns, meaning, span.kind))
            continue
        inside = [one for one in step.buckets if span.start_ns <= one.issue_ns <= span.end_ns]
        last = max((one.issue_ns for one in inside), default=span.end_ns)
        here = min(max([last, *(arrived[one.bucket] for one in inside)]), span.end_ns)
        found.append(Piece(None, span.start_ns, last, "compute", "backward"))
        found.append(Piece(None, last, here, "waiting"))
        found.append(Piece(None, here, span.end_ns, "exposed"))
    for one in step.buckets:
        end = max(step.end_ns if one.end_ns is None else one.end_ns, one.issue_ns)
        here = min(max(one.issue_ns, arrived[one.bucket]), end)
        hidden = min(max(here, ready), end)
        found.append(Piece(one.bucket, one.issue_ns, here, "waiting"))
        found.append(Piece(one.bucket, here, hidden, "hidden"))
        found.append(Piece(one.bucket, hidden, end, "exposed"))
    return [one for one in found if one.end_ns > one.start_ns]


def _arrivals(steps: Iterable[Step], number: int) -> dict[int, int]:
    """By bucket: when the last rank has issued it in the step of this number."""
    arrived: dict[int, int] = {}
    for step in steps:
        for one in step.buckets if step.step == number else ():
            arrived[one.bucket] = max(arrived.get(one.bucket, 0), one.issue_ns)
    return arrived


def medians_ms(spans: Sequence[StepSpan], steps: Sequence[Step], chosen: Sequence[Step]) -> dict[str, float]:
    """Where the time of the chosen steps goes: "step", and the parts of it that are known; medians.

    Args:
        spans: of all ranks.
        steps: of all ranks.
        chosen: some of them.
    """
    of: dict[str, list[float]] = {name: [] for name in ("step", *PARTS)}
    for step in chosen:
        of["step"].append(step.duration_ns / 1e6)
        mine = [one for one in pieces(spans, steps, step) if one.bucket is None]
        for part in PARTS:
            of[part].append(sum(one.end_ns - one.start_ns for one in mine if one.meaning == part) / 1e6)
    return {name: statistics.median(values) for name, values in of.items()}
