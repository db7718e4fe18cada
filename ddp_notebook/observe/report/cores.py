"""Find ranks that were ready to run without a free core, and the processes that used the cores.

The numbers come from the statistics of the scheduler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ddp_notebook.observe.steps.steps import StepTable
from ddp_notebook.observe.tables.matching import RowSource
from ddp_notebook.records.schema import Rows
from ddp_notebook.records.units import ms

LARGE = 0.15  # share of a step above which it is the first sentence of a report
_OTHERS_CORES = 0.25  # a report mentions other processes that use at least this number of cores
_ALL = 0.8  # share of a host's cores above which its ranks count as using all
_OTHERS_SHARE = 0.15  # a report mentions other processes that use at least this share of a host's cores
_LEAST_NS = 200_000_000  # shortest time between two samples: CPU time of a host is counted in ticks of 10 ms
_LEAST_SHARE = 0.5  # steps must take this share of the time between two samples
_AROUND_NS = 300_000_000  # samples arrive with batches, up to this time after a step
_MANY_HOSTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreUse:
    """Time in which main threads of ranks were ready to run without a free core, and the use of the cores."""

    share: float  # share of the time, mean over the ranks
    # For each host: mean number of cores used by other processes, cores used by its ranks, number of its cores.
    used: dict[str, tuple[float, float, int]]

    @property
    def is_large(self) -> bool:
        return self.share >= LARGE

    @property
    def by_others(self) -> bool:
        """Return whether other processes used cores of a host."""
        return any(_counts(others, cores) for others, _, cores in self.used.values())

    @property
    def by_ranks(self) -> bool:
        """Return whether the ranks used all cores of a host."""
        return any(own >= _ALL * cores for _, own, cores in self.used.values())

    def words(self, step_ns: float, ranks: int) -> str:
        """Return a sentence about a step, without its full stop."""
        who = "The rank had" if ranks == 1 else "On average, a rank had"
        text = f"{who} no free core for {ms(self.share * step_ns)} of {ms(step_ns)}"
        others = [
            f"{used:.1f} of {_whose(host)} {cores} cores"
            for host, (used, _, cores) in sorted(self.used.items())
            if _counts(used, cores)
        ]
        own = [
            f"{used:.1f} of {_whose(host)} {cores} cores"
            for host, (_, used, cores) in sorted(self.used.items())
            if used >= _ALL * cores
        ]
        for who, told in (("other processes", others), ("the ranks themselves", own)):
            if told:
                more = f" and {len(told) - _MANY_HOSTS} more hosts" if len(told) > _MANY_HOSTS else ""
                return f"{text}: {who} used {', '.join(told[:_MANY_HOSTS])}{more}"
        return text


def _whose(host: str) -> str:
    return f"{host}'s" if host else "the"


def _counts(used: float, cores: int) -> bool:
    return used >= _OTHERS_CORES and used >= _OTHERS_SHARE * cores


def taken(recording: RowSource, steps: StepTable) -> CoreUse | None:
    """Return the time that ranks waited for a core during these steps; None if it was not counted.

    Args:
        recording: source of `RESOURCE` rows.
        steps: steps of one cell, at least one.
    """
    rows = _counted(recording)
    looks: dict[int, Rows] = {}  # first and last sample, by rank
    for rank in steps.ranks:
        own = steps.rank == rank
        begin_ns, end_ns = int(steps.start_ns[own].min()), int(steps.end_ns[own].max()) + _AROUND_NS
        its = rows[(rows["rank"] == rank) & (rows["time_ns"] >= begin_ns) & (rows["time_ns"] <= end_ns)]
        if len(its) < 2:
            continue
        its = its[[0, -1]]
        between_ns = int(its["time_ns"][1] - its["time_ns"][0])
        is_of_steps = end_ns - _AROUND_NS - its["time_ns"][0] >= _LEAST_SHARE * between_ns
        if is_of_steps and _are_apart(its):
            looks[rank] = its
    return _use(recording, looks) if looks else None


def lacks(recording: RowSource, periods: Mapping[int, tuple[int, int, int]]) -> tuple[dict[int, float], CoreUse] | None:
    """Return how long each rank had no free core, in nanoseconds per step, and the use of the cores.

    The samples are those before the first step and after the last one, so a short run has them too. Time without a core
    outside the run counts as well: it is an upper bound.

    Args:
        recording: source of `RESOURCE` rows.
        periods: for each rank the begin and the end of its steps in nanoseconds, and their number.
    """
    rows = _counted(recording)
    looks: dict[int, Rows] = {}
    found: dict[int, float] = {}
    for rank, (begin_ns, end_ns, steps) in periods.items():
        its = rows[rows["rank"] == rank]
        if len(its) < 2:
            continue
        first = np.searchsorted(its["time_ns"], begin_ns, side="right") - 1
        last = np.searchsorted(its["time_ns"], end_ns)
        around = its[[max(int(first), 0), min(int(last), len(its) - 1)]]
        if _are_apart(around):
            looks[rank] = around
            found[rank] = float(around["ready_ns"][1] - around["ready_ns"][0]) / steps
    return (found, _use(recording, looks)) if looks else None


def _counted(recording: RowSource) -> Rows:
    """Return the samples with statistics of the scheduler, in the order of time."""
    rows = recording.rows("resource")
    rows = rows[rows["ran_ns"] > 0]
    return rows[np.argsort(rows["time_ns"], kind="stable")]


def _are_apart(looks: Rows) -> bool:
    return bool(looks["time_ns"][1] - looks["time_ns"][0] >= _LEAST_NS and looks["ran_ns"][1] >= looks["ran_ns"][0])


def _use(recording: RowSource, looks: dict[int, Rows]) -> CoreUse:
    ready = [_rate(its, "ready_ns") for its in looks.values()]
    used: dict[str, tuple[float, float, int]] = {}
    of_host: dict[str, list[int]] = {}
    for rank in looks:
        of_host.setdefault(recording.hosts[rank] if rank < len(recording.hosts) else "", []).append(rank)
    for host, ranks in of_host.items():
        if len(ranks) < (list(recording.hosts).count(host) if recording.hosts else recording.world_size):
            continue  # the CPU time of an unknown rank would count as that of another process
        busy = float(np.mean([_rate(looks[rank], "host_busy_ns") for rank in ranks]))
        own = sum(_rate(looks[rank], "ran_ns") for rank in ranks)
        used[host] = max(busy - own, 0.0), own, int(looks[ranks[0]]["host_cores"][-1])
    return CoreUse(share=float(np.mean(ready)), used=used)


def counts_cores(recording: RowSource, ranks: Sequence[int]) -> bool:
    """Return whether ranks count the time that they wait for a core, and compute on CPUs.

    If `taken` returns None for such ranks, the steps are too short for two samples.
    """
    rows = recording.rows("resource")
    rows = rows[np.isin(rows["rank"], ranks)]
    return bool((rows["ran_ns"] > 0).any()) and not bool((rows["gpu_allocated_bytes"] >= 0).any())


def _rate(looks: Rows, column: str) -> float:
    """Return the increase of a column between two samples, in nanoseconds per nanosecond."""
    return float(looks[column][1] - looks[column][0]) / float(looks["time_ns"][1] - looks["time_ns"][0])


def shared(recording: RowSource, ranks: Sequence[int]) -> tuple[str, ...]:
    """Return a note for each machine that has more of these ranks than cores, and no GPUs for them."""
    rows = recording.rows("resource")
    rows = rows[(rows["cores"] > 0) & (rows["gpu_allocated_bytes"] < 0)]
    known = {rank: int(rows["cores"][rows["rank"] == rank][-1]) for rank in ranks if (rows["rank"] == rank).any()}
    of_host: dict[str, list[int]] = {}
    for rank in known:
        of_host.setdefault(recording.hosts[rank] if rank < len(recording.hosts) else "", []).append(rank)
    notes = []
    for host, own in of_host.items():
        count = max(known[rank] for rank in own)
        if len(own) > count:
            where = f" of {host}" if host else ""
            notes.append(
                f"{len(own)} ranks on {count} core{'s' * (count != 1)}{where}: they share the cores, so each phase may "
                "take longer than with a core for each rank"
            )
    return tuple(notes)
