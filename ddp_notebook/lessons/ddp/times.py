"""Divides the steps of a run into pieces of time for each rank, which pictures draw and tables sum.

    work       |forward |backward        |waiting|exposed   |optimizer|
    bucket 0            |waiting|hidden  |exposed|
    bucket 1                    |waiting         |exposed   |
                      all ranks have issued it ^

After the last bucket of a backward pass was issued, the rank has nothing left to compute. It waits until the last rank
has issued that bucket too. From then on communication is exposed.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ddp_notebook.observe.views import Step

PARTS = ("compute", "waiting", "exposed", "optimizer")
_PART_OF = {"forward": "compute", "backward": "compute"}


class StepSpan(NamedTuple):
    """A forward, backward or optimizer step of a rank."""

    rank: int
    start_ns: int
    end_ns: int
    kind: str


class Piece(NamedTuple):
    """A piece of time of a rank, or of one of its buckets."""

    bucket: int | None  # None: the work of the rank
    start_ns: int
    end_ns: int
    meaning: str  # key of a colour, see `ddp_notebook.display.fill_style`
    words: str = ""


def pieces(spans: Iterable[StepSpan], steps: Sequence[Step], step: Step) -> list[Piece]:
    """Return the pieces of one step of one rank.

    Args:
        spans: Spans of all ranks.
        steps: Steps of all ranks.
        step: Step to divide.
    """
    arrived = _arrivals(steps, step.step)
    found: list[Piece] = []
    ready = max((one.issue_ns for one in step.buckets), default=step.start_ns)
    for span in spans:
        if span.rank != step.rank or not step.start_ns <= span.start_ns < step.end_ns:
            continue
        if span.kind != "backward":
            found.append(Piece(None, span.start_ns, span.end_ns, span.kind, span.kind))
            continue
        inside = [one for one in step.buckets if span.start_ns <= one.issue_ns <= span.end_ns]
        last = max((one.issue_ns for one in inside), default=span.end_ns)
        here = min(max([last, *(arrived[one.bucket] for one in inside)]), span.end_ns)
        found.append(Piece(None, span.start_ns, last, "backward", "backward"))
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
    """Return by bucket the time at which the last rank has issued it in this step."""
    arrived: dict[int, int] = {}
    for step in steps:
        for one in step.buckets if step.step == number else ():
            arrived[one.bucket] = max(arrived.get(one.bucket, 0), one.issue_ns)
    return arrived


def medians_ms(spans: Sequence[StepSpan], steps: Sequence[Step], chosen: Sequence[Step]) -> dict[str, float]:
    """Return the median time of the chosen steps: "step", and its known parts.

    Args:
        spans: Spans of all ranks.
        steps: Steps of all ranks.
        chosen: Steps to include.
    """
    of: dict[str, list[float]] = {name: [] for name in ("step", *PARTS)}
    for step in chosen:
        of["step"].append(step.duration_ns / 1e6)
        mine = [one for one in pieces(spans, steps, step) if one.bucket is None]
        for part in PARTS:
            pieces_ns = [one.end_ns - one.start_ns for one in mine if _PART_OF.get(one.meaning, one.meaning) == part]
            of[part].append(sum(pieces_ns) / 1e6)
    return {name: statistics.median(values) for name, values in of.items()}
