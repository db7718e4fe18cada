"""Measures of a recorded solution: bytes, calls, memory, exposed communication."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddp_notebook.observe.report.bandwidth import bus_factor
from ddp_notebook.observe.views import Collective, Step, settled
from ddp_notebook.records.units import at_most_three_figures, size

if TYPE_CHECKING:
    from ddp_notebook import Recording


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """The recorded run of a solution."""

    ranks: tuple[int, ...]
    calls: tuple[Collective, ...]  # the calls of all ranks; see `without_hooks`
    steps: tuple[Step, ...]  # optimizer steps of all ranks
    peak_bytes: Mapping[int, int]  # keys are ranks; {} if no target needs it
    recording: Recording
    cell: int | None  # number of the cell in the recording; None without calls and steps

    def calls_of(self, rank: int) -> list[Collective]:
        """Return the calls of one rank."""
        return [call for call in self.calls if call.rank == rank]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A measured quantity with one value for each rank.

    Args:
        name: Name in a sentence: "bytes sent".
        of: Returns the values by rank. A rank may be missing, if it has no such value.
        in_words: Formats a value.
        needs_memory: The solution must run once more to measure its memory.
    """

    name: str
    of: Callable[[Attempt], Mapping[int, float]]
    in_words: Callable[[float], str] = at_most_three_figures
    needs_memory: bool = False


def without_hooks(calls: Iterable[Collective]) -> tuple[Collective, ...]:
    """Return the calls without the buckets of DDP communication hooks.

    A recording has a row for each bucket of a hook, with the bytes of its gradients, in addition to the rows of the
    collectives that the hook calls. Only the latter are sent.
    """
    return tuple(call for call in calls if not call.op.startswith("comm hook "))


def sent_bytes(call: Collective) -> float:
    """Return the bytes that a rank sends in a call, if the operation sends as little as possible.

    A send counts with its size, and a receive does not count. For the collectives see `observe/report/bandwidth`.
    """
    if call.op == "recv":
        return 0.0
    return call.nbytes * bus_factor(call.op, len(call.ranks))


def _by_rank(of: Callable[[list[Collective]], float]) -> Callable[[Attempt], Mapping[int, float]]:
    return lambda attempt: {rank: of(attempt.calls_of(rank)) for rank in attempt.ranks}


def _exposed(attempt: Attempt, of: Callable[[Step], float]) -> Mapping[int, float]:
    """Return the median over the steps after the warm-up, by rank."""
    found = {rank: settled([step for step in attempt.steps if step.rank == rank]) for rank in attempt.ranks}
    return {rank: statistics.median(map(of, steps)) for rank, steps in found.items() if steps}


SENT = Measure(name="bytes sent", of=_by_rank(lambda calls: sum(map(sent_bytes, calls))), in_words=size)
CALLS = Measure(name="calls", of=_by_rank(len))
SENDS = Measure(name="sends", of=_by_rank(lambda calls: sum(call.op == "send" for call in calls)))
COLLECTIVES = Measure(
    name="collective calls", of=_by_rank(lambda calls: sum(not call.is_point_to_point for call in calls))
)
PEAK = Measure(name="peak memory", of=lambda attempt: attempt.peak_bytes, in_words=size, needs_memory=True)
EXPOSED_MS = Measure(
    name="exposed communication per step",
    of=lambda attempt: _exposed(attempt, lambda step: step.exposed_ns / 1e6),
    in_words=lambda value: f"{at_most_three_figures(value)} ms",
)
EXPOSED_SHARE = Measure(
    name="exposed share of the communication",
    of=lambda attempt: _exposed(attempt, lambda step: step.exposed_ns / max(step.communication_ns, 1)),
    in_words=lambda value: f"{value:.0%}",
)
